"""DocChunkRequest: what the chunk cache knows of one request, from its first match to its release.

Verbs: `state_of` (read or create it for a `Req`), `discover` (marks one that nobody marked), `forget` (SGLang refuses
it), `ChunkRequest.admit` (a load was made: its rows are due), `load_due` (the next forward must add them),
`complete_rows` (they were added), `restart` (retracted).

Picture of a prompt (positions grow to the right)::

    0            prefix_len                       load_end            prompt_len
    | exact prefix | reused | recomputed | missing | tail (question) ... |
                   |<-- loaded range: private slots -->|<-- ordinary extend -->|

Rows that the fused forward adds in front of the ordinary extend are the recomputed and the missing positions of the
loaded range; `RecomputePlan.row_positions` lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chunk_cache.index.system_prompt import marks_of
from chunk_cache.keys import Partition, chunk_keys
from chunk_cache.manager import ChunkPrompt
from chunk_cache.options.request_options import MAX_CHUNKS, RequestOptions, loads
from chunk_cache.plan.selector_answer import SelectorAnswer

if TYPE_CHECKING:
    import torch

    from chunk_cache.gate.controller import Decision
    from chunk_cache.gate.verification_queue import Candidate
    from chunk_cache.options.kept_tokens import KeptTokens
    from chunk_cache.plan.discover import Discoverer
    from chunk_cache.plan.recompute_plan import RecomputePlan
    from sglang_chunk_cache.forward.selection.report import SelectionReport
    from sglang_chunk_cache.forward.statistics_taker import ChunkSums
    from sglang_chunk_cache.kv.partial_load import LayerCopy
    from sglang_chunk_cache.tiers.search import Outcome

PARAM_NAME = "chunk_cache"
_ATTRIBUTE = "doc_chunk_request"


@dataclass(slots=True)
class ChunkRequest:
    """State of one request; owned by the scheduler process, dies with the request.

    Attributes:
        prompt: its marked chunks and options, as the manager knows them.
        partition: namespace of the request; chunks of another one are never found.
        unsupported: it uses a feature that reuse does not support, so it is served exactly.
        plan: newest plan; replaced at every match until the request is admitted.
        reported: the plan of the first admission; the reply speaks of this one.
        is_replied: the reply was sent.
        private_indices: `[load_end - prefix_len]` int64 slots of the loaded range, on the device; its own.
        sums: statistics of the chunks that were computed so far.
        selection_report: what the forward chose, where the client asked to explain it.
        fused: part of the prompt's KV was brought in from chunks, so it must never enter the exact cache.
        remembered: the chunks of this (exact) request are in the index already.
        layer_copies: what the load brings in layer by layer, during the forward.
        tiers: what became of the chunks that the KV pool did not have when the request came, by key; None = there are
            no tiers below it.
        is_discovered: its chunks were found in a prompt without marks.
        decision: how the target of the server has it served; None = it says so itself, or there is no target.
        candidate: it is to be verified; None = it is not, or is no longer.
        kept: what decoding keeps of the prompt; None = all.
        kept_scores: float32 `[num_layers, num_kv_heads, kept.end - kept.begin]`, as far as the window was computed.
        chosen: int64 `[num_layers, num_kv_heads, kept.room]`, ascending positions, from the prompt's last forward
            on until it is packed.
        is_prefilled: the prompt was computed and checkpointed, so that it may be packed.
        held_since: when it began to wait in the queue for loads or scores, ns since 1970; None = it does not.
        is_packed: its row of slots holds what is kept, and no more the KV of its prompt token by token.
    """

    prompt: ChunkPrompt
    partition: Partition
    unsupported: bool = False
    plan: RecomputePlan | None = None
    reported: RecomputePlan | None = None
    is_replied: bool = False
    private_indices: torch.Tensor | None = None
    fused: bool = False
    remembered: bool = False
    selection_report: SelectionReport | None = None
    sums: ChunkSums | None = None
    layer_copies: tuple[LayerCopy, ...] = ()
    tiers: Mapping[bytes, Outcome] | None = None
    is_discovered: bool = False
    decision: Decision | None = None
    candidate: Candidate | None = None
    kept: KeptTokens | None = None
    kept_scores: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    is_prefilled: bool = False
    is_packed: bool = False
    held_since: int | None = None

    @property
    def options(self) -> RequestOptions:
        """What the client asked for."""
        return self.prompt.options

    @property
    def keys(self) -> tuple[bytes, ...]:
        """One key per marked chunk."""
        return self.prompt.keys

    @property
    def may_await_scores(self) -> bool:
        """Whether it was not admitted yet and has no answer of the selector."""
        return self.prompt.answer is None and self.reported is None and not self.unsupported

    @property
    def missing_reasons(self) -> dict[bytes, str]:
        """Why chunks could not be brought up from the tiers, by key."""
        return {key: found.reason for key, found in (self.tiers or {}).items() if found.reason is not None}

    @property
    def load_due(self) -> bool:
        """The loaded range was filled and its forward has not run yet."""
        return self.private_indices is not None

    @property
    def num_dropped(self) -> int:
        """Tokens by which the request's row of slots is shorter than the positions that it stands for."""
        return self.kept.num_dropped if self.is_packed and self.kept is not None else 0

    @property
    def load_len(self) -> int:
        """Tokens that the current plan loads into private slots."""
        return 0 if self.plan is None else self.plan.load_end - self.plan.load_start

    def admit(self, private_indices: torch.Tensor, layer_copies: tuple[LayerCopy, ...]) -> None:
        """The loaded range is in `private_indices`; the rows of the plan are due from now on."""
        assert len(private_indices) == self.load_len > 0
        self.private_indices = private_indices
        self.layer_copies = layer_copies
        self.fused = True

    def complete_rows(self) -> None:
        """The rows went into a forward; the slots are in the request's own row by now."""
        self.private_indices = None
        self.layer_copies = ()

    def restart(self) -> None:
        """The request lost its KV (retraction); the next match plans anew."""
        self.complete_rows()
        self.plan = None
        self.fused = False
        self.remembered = False
        self.sums = None
        self.kept = self.kept_scores = self.chosen = None
        self.is_prefilled = self.is_packed = False


def state_of(req: Any) -> ChunkRequest | None:
    """The state of `req`, or None where the client neither marked chunks nor gave options."""
    state: ChunkRequest | bool | None = getattr(req, _ATTRIBUTE, False)
    if state is False:
        state = _create(req)
        setattr(req, _ATTRIBUTE, state)
    return state  # type: ignore[return-value]


def forget(req: Any) -> None:
    """From now on `req` is one without marks: SGLang has refused it, and put one token in the place of its prompt."""
    setattr(req, _ATTRIBUTE, None)


def discover(req: Any, discoverer: Discoverer) -> None:
    """Gives a request that nobody marked the passages that were there before, and learns from it; once per request."""
    if getattr(req, _ATTRIBUTE, False) is not False:
        return
    state = state_of(req)
    options = RequestOptions() if state is None else state.options
    if options.mode != "auto" or req.session is not None or not _is_supported(req):
        return
    partition, ids = Partition(req.extra_key, req.cache_salt), req.origin_input_ids
    if options.spans:
        for start, end in options.spans:
            discoverer.note(partition, ids[start:end])
        return
    spans = discoverer.find(partition, ids)
    if spans:
        state = _state_with(req, replace(options, spans=spans))
        state.is_discovered = True
        state.prompt.answer = SelectorAnswer(None, "unsupported", 0.0)  # it is asked where prompts are tokenized
        setattr(req, _ATTRIBUTE, state)


def _create(req: Any) -> ChunkRequest | None:
    params = req.sampling_params.custom_params
    text = params.get(PARAM_NAME) if isinstance(params, dict) else None
    options = None if text is None else loads(text)
    if req.session is not None:
        options = _with_earlier_turns(req, options)
    if options is None:
        return None
    state = _state_with(req, options)
    if req.session is not None:
        state.prompt.answer = SelectorAnswer(None, "unsupported", 0.0)  # the selector sees one turn only
    return state


def _state_with(req: Any, options: RequestOptions) -> ChunkRequest:
    partition = Partition(req.extra_key, req.cache_salt)
    ids = req.origin_input_ids
    # The tokenizer process checked the spans against the prompt; a prompt that was cut afterwards is served exactly.
    is_whole = len(ids) >= len(req.origin_input_ids_unpadded)
    fits = is_whole and all(end <= len(ids) for _, end in options.spans)
    if not fits:
        options = replace(options, spans=())
    system = marks_of(ids[: options.spans[0][0]]) if options.spans else b""
    prompt = ChunkPrompt(options, tuple(chunk_keys(partition, ids, options.spans)), system)
    return ChunkRequest(prompt, partition, unsupported=not (fits and _is_supported(req)))


def _with_earlier_turns(req: Any, options: RequestOptions | None) -> RequestOptions | None:
    """The options of a turn of a session, with spans that count in the whole prompt, those of earlier turns in front.

    A turn without options has those of the turn in front of it. An earlier chunk counts as long as its tokens stand
    where they stood: a turn may drop the end of the history. Of more than a prompt may have, the newest count.
    """
    ids, own = req.origin_input_ids, () if options is None else options.spans
    if options is not None and options.turn_tokens is not None:
        begin = len(req.origin_input_ids_unpadded) - options.turn_tokens  # of the prompt before it was cut
        own = tuple((begin + start, begin + end) for start, end in own)
    node = req.session.req_nodes.get(req.rid)
    parent: Any = None if node is None or node.parent is None else node.parent.req
    before = None if parent is None else state_of(parent)
    earlier = () if before is None else before.options.spans
    own_start = own[0][0] if own else len(ids)
    kept = itertools.takewhile(
        lambda span: span[1] <= own_start and ids[slice(*span)] == parent.origin_input_ids[slice(*span)], earlier
    )
    options = options or (None if before is None else before.options)
    return None if options is None else replace(options, spans=(*kept, *own)[-MAX_CHUNKS:], turn_tokens=None)


def _is_supported(req: Any) -> bool:
    # Inputs whose KV does not follow from the token ids alone, and experts, which SGLang keeps by slot.
    return (
        req.input_embeds is None
        and req.positional_embed_overrides is None
        and req.multimodal_inputs is None
        and not req.return_routed_experts
    )
