"""ChunkRequest: what the chunk cache knows of one request, from its first match to its release.

Verbs: `state_of` (reads or creates it for a `Req`), `discover` (marks chunks in an unmarked request), `forget` (SGLang
refused it). Of a `ChunkRequest`: `report` (SGLang admitted it), `fail_load` (KV did not arrive), `restart` (retracted).
Of its `Admission`: `propose` (after a match), `bring_in` (a load was made: its rows are due), `take_load` (a forward
adds them).

Picture of a prompt (positions grow to the right)::

    0            prefix_len                       load_end            prompt_len
    | exact prefix | reused | recomputed | missing | tail (question) ... |
                   |<-- loaded range: private slots -->|<-- ordinary extend -->|

Rows that the fused forward adds in front of the ordinary extend are the recomputed and the missing positions of the
loaded range; `RecomputePlan.row_positions` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chunk_cache.keys import Partition
from chunk_cache.options.request_options import MAX_CHUNKS, PREPARING, RequestOptions, loads, with_earlier_turns
from chunk_cache.plan.recompute_plan import RecomputePlan, lead_end
from chunk_cache.plan.selector_answer import SelectorAnswer
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from sglang_chunk_cache.kv.packing import Packing
from sglang_chunk_cache.request.request_images import cut_image, image_spans, rope_starts_of

if TYPE_CHECKING:
    from chunk_cache.gate.controller import Decision
    from chunk_cache.gate.verification_queue import Candidate
    from chunk_cache.index.transition_store import ChunkTransitions
    from chunk_cache.prompt.discover import Discoverer
    from sglang_chunk_cache.kv.chunk_sums import ChunkSums
    from sglang_chunk_cache.kv.pool import Load
    from sglang_chunk_cache.kv.transition import Transition
    from sglang_chunk_cache.request.selection_report import SelectionReport
    from sglang_chunk_cache.tiers.search import Outcome

PARAM_NAME = "chunk_cache"
_ATTRIBUTE = "chunk_cache_request"
_WAS_SEARCHED = "chunk_cache_was_searched"
_NOBODY_ASKED = SelectorAnswer(None, "unsupported", 0.0)


@dataclass(slots=True)
class Verification:
    """What the gate decided about a request.

    Attributes:
        decision: how the server's target serves it; None = the request says how, or there is no target.
        candidate: the request in the queue of verifications; None = it is not to be verified, or no longer.
    """

    decision: Decision | None = None
    candidate: Candidate | None = None


@dataclass(slots=True)
class Reported:
    """What the reply describes.

    Attributes:
        plan: of the first admission.
        selection: what its forward chose, where the client asked to explain it.
    """

    plan: RecomputePlan
    selection: SelectionReport | None = None


@dataclass(slots=True)
class Admission:
    """How a prompt is served: planned at every match, loaded when it is admitted, computed by forwards.

    Attributes:
        plan: the newest; None = the prompt was not matched yet.
        load: what was brought in and no forward has taken yet.
        is_fused: part of the prompt's KV is of chunks that were brought in, so it must never enter the exact cache.
        in_steps: it is brought in over several steps.
        part: what the first step brings in; None = nothing, or all.
    """

    plan: RecomputePlan | None = None
    load: Load | None = None
    is_fused: bool = False
    in_steps: bool = False
    part: RecomputePlan | None = None

    @property
    def load_plan(self) -> RecomputePlan | None:
        """The plan where it brings chunks in; else None."""
        return None if self.plan is None or not self.plan.load_len else self.plan

    @property
    def fused_plan(self) -> RecomputePlan | None:
        """The plan of a prompt with KV of chunks in it; None for one that is exact."""
        return self.plan if self.is_fused else None

    def propose(self, plan: RecomputePlan) -> None:
        """Sets the plan of a match, or one that loads nothing after all. A load that was made keeps its slots."""
        self.plan, self.in_steps, self.part = plan, False, None

    def cut(self, part: RecomputePlan | None) -> None:
        """The load is split over several steps; the first brings in `part` (None = nothing)."""
        self.in_steps, self.part = True, part

    def reach(self, end: int) -> None:
        """A step computes up to `end`. From the first chunk on the prompt is fused, as if all were loaded at once."""
        if self.in_steps and self.load_plan is not None and end > lead_end(self.load_plan.chunks):
            self.is_fused = True

    def bring_in(self, load: Load) -> None:
        """The loaded range has its slots; the rows of its plan are due from now on."""
        assert load.plan is self.plan or self.in_steps
        assert len(load.slots) == load.plan.load_len > 0
        self.load, self.is_fused = load, True

    def take_load(self) -> Load | None:
        """Gives the load, once, to the forward that adds its rows; its slots are in the request's own row by now."""
        load, self.load = self.load, None
        return load


@dataclass(slots=True)
class ChunkRequest:
    """State of one request; owned by the scheduler process, dies with the request.

    Each value has one writer, named below. Those up to `is_replied` live as long as the request, the others as long as
    its KV.

    Attributes:
        prompt: its marked chunks and options, frozen. `host/selector` replaces it when the selector has answered.
        tiers: what became of the chunks that the KV pool did not have when the request came, by key; None = there are
            no tiers below it. Written by `host/schedule_batch`.
        held_since: when it began to wait in the queue for loads or scores, ns since 1970; None = it does not. Written
            by `host/scheduler`.
        verification: written by `verification/gate`.
        reported: None = not admitted yet. Written by `report` and `fail_load`, its selection by
            `forward/batch/choices`.
        is_replied: the reply was sent. Written by `host/output_streamer`.
        admission: changed by its verbs, which `host/radix_cache` calls, and the forward that takes the load.
        sums: statistics of the chunks that were computed so far. Written by `forward/statistics_taker`.
        transitions: what its chunks do to states, as far as they were computed; None = nothing was taken. Written by
            `forward/batch/state_rows`.
        packing: changed by its verbs, which `host/radix_cache`, `forward/kept_chooser` and `kv/packer` call.
    """

    prompt: ChunkPrompt
    tiers: Mapping[bytes, Outcome] | None = None
    held_since: int | None = None
    verification: Verification = field(default_factory=Verification)
    reported: Reported | None = None
    is_replied: bool = False
    admission: Admission = field(default_factory=Admission)
    sums: ChunkSums | None = None
    transitions: ChunkTransitions[Transition] | None = None
    packing: Packing = field(default_factory=Packing)

    @property
    def options(self) -> RequestOptions:
        """What the client asked for."""
        return self.prompt.options

    @property
    def may_await_scores(self) -> bool:
        """Whether it was not admitted yet and has no answer of the selector."""
        return self.prompt.answer is None and self.reported is None and not self.prompt.unsupported

    @property
    def missing_reasons(self) -> dict[bytes, str]:
        """Why chunks could not be brought up from the tiers, by key."""
        return {key: found.reason for key, found in (self.tiers or {}).items() if found.reason is not None}

    def report(self, plan: RecomputePlan) -> None:
        """It is admitted for the first time, with this plan."""
        self.reported = Reported(plan)

    def fail_load(self, plan: RecomputePlan) -> None:
        """KV did not arrive: `plan` computes it instead, also in the reply if that describes this admission."""
        if self.reported is None or self.reported.plan is self.admission.plan:
            self.reported = Reported(plan)
        self.admission.propose(plan)

    def restart(self) -> None:
        """The request lost its KV (retraction); the next match plans anew."""
        self.admission = Admission()
        self.sums = None
        self.transitions = None
        self.packing = Packing()


def state_of(req: Any) -> ChunkRequest | None:
    """The state of `req`, or None where the client neither marked chunks nor gave options."""
    state: ChunkRequest | bool | None = getattr(req, _ATTRIBUTE, False)
    if state is False:
        state = _create(req)
        setattr(req, _ATTRIBUTE, state)
    return state  # type: ignore[return-value]


def forget(req: Any) -> None:
    """Treats `req` as unmarked from now on: SGLang has refused it, and put one token in the place of its prompt."""
    setattr(req, _ATTRIBUTE, None)


def leave_images_exact(req: Any) -> None:
    """Has a request with images computed exactly, on a server that reuses nothing beside them."""
    state = state_of(req)
    if state is not None and state.prompt.images:
        state.prompt = replace(state.prompt, unsupported=True)


def discover(req: Any, discoverer: Discoverer) -> None:
    """Marks passages of earlier prompts in a request that nobody marked, and learns its own; once per request."""
    if getattr(req, _WAS_SEARCHED, False):
        return
    setattr(req, _WAS_SEARCHED, True)
    state = state_of(req)
    options = RequestOptions() if state is None else state.options
    # What is found beside images may begin or end within one.
    is_whole = req.session is None and req.multimodal_inputs is None and req.beam_group is None
    if options.mode == "off" or not is_whole or not _is_supported(req):
        return
    partition, ids = Partition(req.extra_key, req.cache_salt), req.origin_input_ids
    if options.spans:
        # What stands in front of a chunk that is prepared may be filler.
        for start, end in options.spans[-1:] if options.mode in PREPARING else options.spans:
            discoverer.note(partition, ids[start:end])
        return
    if options.mode != "auto":
        return
    spans = discoverer.find(partition, ids)[:MAX_CHUNKS]
    if spans:
        prompt = _prompt_of(req, options.with_spans(spans))
        # Too late to ask the selector: prompts are tokenized already.
        state = ChunkRequest(replace(prompt, is_discovered=True, answer=_NOBODY_ASKED))
        setattr(req, _ATTRIBUTE, state)


def _create(req: Any) -> ChunkRequest | None:
    params = req.sampling_params.custom_params
    text = params.get(PARAM_NAME) if isinstance(params, dict) else None
    options = None if text is None else loads(text)
    if req.session is not None:
        options = _as_turn(req, options)
    if options is None:
        return None
    prompt = _prompt_of(req, options)
    # The selector sees one turn only.
    return ChunkRequest(prompt if req.session is None else replace(prompt, answer=_NOBODY_ASKED))


def _prompt_of(req: Any, options: RequestOptions) -> ChunkPrompt:
    partition = Partition(req.extra_key, req.cache_salt)
    ids = req.origin_input_ids
    # The tokenizer process checked the spans against the prompt; a prompt that was cut afterwards is served exactly.
    is_whole = len(ids) >= len(req.origin_input_ids_unpadded)
    images = image_spans(req)
    fits = is_whole and all(span[1] <= len(ids) and cut_image(span, images or ()) is None for span in options.spans)
    if not fits:
        options = options.with_spans(())
    if images is None or not (fits and _is_supported(req)):
        return ChunkPrompt.of(options, ids, partition, unsupported=True)
    return ChunkPrompt.of(options, ids, partition, images=images, rope_starts=rope_starts_of(req, options.spans))


def _as_turn(req: Any, options: RequestOptions | None) -> RequestOptions | None:
    """The options of a turn of a session, with the chunks of earlier turns."""
    node = req.session.req_nodes.get(req.rid)
    parent: Any = None if node is None or node.parent is None else node.parent.req
    before = None if parent is None else state_of(parent)
    return with_earlier_turns(
        options,
        None if before is None else before.options,
        req.origin_input_ids,
        None if parent is None else parent.origin_input_ids,
        num_uncut=len(req.origin_input_ids_unpadded),
    )


def _is_supported(req: Any) -> bool:
    # Not: inputs whose KV does not follow from the token ids alone; returned experts, which SGLang keeps by slot.
    return req.input_embeds is None and req.positional_embed_overrides is None and not req.return_routed_experts
