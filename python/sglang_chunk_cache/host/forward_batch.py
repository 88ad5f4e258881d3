"""ForwardBatch: rows that are due stand in front of an ordinary extend.

Verb (handler of a hook): `init_forward_batch` adds the rows that are due to the batch that the model sees, and tells
`host/model_runner.py` how to compute them. A model that drafts sees the same rows behind the target, as `kv/draft.py`
says.

Promises: the scheduler's batch is never changed; the model sees a copy in which a fused request simply extends by more
tokens. All lengths of that copy agree, so whatever SGLang derives from them (logit positions, LoRA segments, padding
counts) is right; only the positions of the added rows are scattered, and they are replaced afterwards. Logits are taken
from the last row, which is the last token of the ordinary extend.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group

from chunk_cache.gate.verification_queue import Candidate
from chunk_cache.plan.recompute_plan import RecomputePlan
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.flags.step_limits import step_len
from sglang_chunk_cache.forward.attending import Observer
from sglang_chunk_cache.forward.forward_changes import ForwardChanges, Part, announce
from sglang_chunk_cache.forward.kept_chooser import KeptChooser
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.runs import BackendRuns, Runs, StockServedRequests
from sglang_chunk_cache.forward.selection.executor import FirstPass, LateRows, LayerwiseForward
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.tables import Tables
from sglang_chunk_cache.forward.statistics_taker import StatisticsTaker
from sglang_chunk_cache.kv.layer_kv import is_latent
from sglang_chunk_cache.request.chunk_request import ChunkRequest, state_of
from sglang_chunk_cache.start.runtime import ChunkRuntime, runtime_of
from sglang_chunk_cache.telemetry.stages import stage

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_chunk_cache.kv.partial_load import LayerCopy

logger = logging.getLogger(__name__)

_DUE_IN_DRAFT = "chunk_cache_due_in_draft"
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class AddedRows:
    """Rows that a forward adds in front of one request's extend.

    Attributes:
        positions: `[num_load_rows]` int64, ascending; late rows stand at any reused position, as placeholders.
        state: of the request; None where nothing is due, or everything.
        layer_copies: KV of the loaded range that is still on its way.
        load_start: where the loaded range, or what is left of it, begins; None where nothing is due.
    """

    positions: np.ndarray
    state: ChunkRequest | None = None
    layer_copies: tuple[LayerCopy, ...] = ()
    load_start: int | None = None

    @property
    def plan(self) -> RecomputePlan | None:
        """Of the request; None where nothing is due, or everything."""
        return None if self.state is None else self.state.plan


_NOTHING_DUE = AddedRows(_NO_ROWS)


def init_forward_batch(
    original: Callable[..., ForwardBatch], cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **kwargs: Any
) -> ForwardBatch:
    """AROUND `ForwardBatch.init_new`."""
    chunks = runtime_of(batch.tree_cache)
    if chunks is None or not batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        forward_batch = original(cls, batch, model_runner, **kwargs)
        if chunks is not None and batch.forward_mode.is_decode():
            _move_to_true_positions(forward_batch, batch)
        return forward_batch
    build = partial(_init_parts, original, cls, batch, model_runner, chunks)
    if model_runner.is_draft_worker:
        due = vars(batch).pop(_DUE_IN_DRAFT, None)
        if due is None:
            return original(cls, batch, model_runner, **kwargs)
        # The plan is of the rows of the target's last forward.
        return _draft_batch(batch, build(kwargs | {"kv_loc_plan": None}, due))
    if chunks.pool.has_copies:
        with stage(chunks.metrics, "assembling", [req for req in batch.reqs if (s := state_of(req)) and s.load_due]):
            chunks.pool.flush()
    due = _take_due_rows(batch)
    if due is not None and chunks.assembler.draft is not None:
        setattr(batch, _DUE_IN_DRAFT, [_due_in_draft(one) for one in due])
    rows = () if chunks.gate is None else _first_rows(batch)
    if due is None:
        observers = _observers(batch, model_runner, chunks, batch.prefix_lens)
        extras = ForwardChanges(observers=observers, timing=_timing(chunks, batch, ()), first_rows=rows)
        forward_batch = original(cls, batch, model_runner, **kwargs)
    else:
        build = partial(build, kwargs)
        parts = build(due)
        forward_batch = parts[-1].batch
        copies = [copy for one in due for copy in one.layer_copies]
        tails = _tail_lens(batch)
        if copies:
            # A forward that waits for layers says nothing of what computing takes.
            assert chunks.landings is not None
            loads, again = chunks.landings.loads(copies), partial(_without_loads, build, chunks, batch, due)
            extras = ForwardChanges.of(parts, loads=loads, again=again, tail_lens=tails, first_rows=rows)
        else:
            timing = _timing(chunks, batch, due)
            extras = ForwardChanges.of(parts, timing=timing, tail_lens=tails, first_rows=rows)
    if extras.changes_anything:
        announce(forward_batch, extras)
    return forward_batch


def _tail_lens(batch: ScheduleBatch) -> tuple[int, ...] | None:
    """Hidden states are returned of the ordinary extends, but a draft of EAGLE wants those of all rows."""
    return None if batch.spec_algorithm.is_eagle() else tuple(batch.extend_lens)


def _due_in_draft(due: AddedRows) -> AddedRows:
    """All that the target begins with; what it chooses during its forward is not chosen for a draft."""
    positions = due.positions if due.plan is None or not due.plan.num_late_rows else due.plan.row_positions
    return AddedRows(positions, load_start=due.load_start)


def _draft_batch(batch: ScheduleBatch, parts: list[Part]) -> ForwardBatch:
    """A prompt in the model that drafts, behind the target's forward of the same batch.

    SGLang's `_draft_extend_for_prefill` asks for it, with the hidden states of the target's rows where the draft reads
    them.
    """
    batches = [part.batch for part in parts]
    hidden = batch.spec_info.hidden_states
    if len(parts) > 1 and hidden is not None:
        for one, own in zip(batches, hidden.split([one.extend_num_tokens for one in batches]), strict=True):
            one.spec_info = copy.copy(one.spec_info)
            one.spec_info.hidden_states = own
    announce(batches[-1], ForwardChanges.of(parts))
    return batches[-1]


def _move_to_true_positions(forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
    """A packed request has fewer slots than tokens; SGLang takes the position of a new token from their number."""
    num_dropped = [0 if (state := state_of(req)) is None else state.num_dropped for req in batch.reqs]
    if any(num_dropped):
        (moved,) = upload([np.array(num_dropped, dtype=np.int64)], forward_batch.positions.device)
        forward_batch.positions = forward_batch.positions + moved


def _observers(
    batch: ScheduleBatch, model_runner: ModelRunner, chunks: ChunkRuntime, begins: Sequence[int], end: int | None = None
) -> tuple[Observer, ...]:
    """Of what a forward computes from `begins` on, per request, up to `end` or that of the extend."""
    ends = [p + n if end is None else end for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    spans = list(zip(begins, ends, strict=True))
    kv_pool = model_runner.token_to_kv_pool
    statistics = StatisticsTaker.plan(
        batch, chunks.statistics_layers, kv_pool, chunks.kernel, chunks.config.statistics_heads, spans
    )
    kept = KeptChooser.plan(batch, kv_pool, chunks.kernel, model_runner.model_config.num_hidden_layers)
    return tuple(one for one in (statistics, kept) if one is not None)


def _without_loads(
    build: Callable[[list[AddedRows]], list[Part]],
    chunks: ChunkRuntime,
    batch: ScheduleBatch,
    due: list[AddedRows],
    reason: str,
) -> ForwardBatch:
    """The same batch once more, with every token computed where KV was to arrive that does not."""
    everything = list(due)
    for i, one in enumerate(due):
        if one.layer_copies:
            assert one.plan is not None
            # The slots of the load stay the request's own; all that they hold is computed now.
            everything[i] = AddedRows(np.arange(one.plan.load_start, one.plan.load_end), load_start=one.plan.load_start)
            _note_load_failed(chunks, batch.reqs[i], one, reason)
    parts = build(everything)
    announce(parts[-1].batch, ForwardChanges.of(parts, tail_lens=_tail_lens(batch)))
    return parts[-1].batch


def _note_load_failed(chunks: ChunkRuntime, req: Req, due: AddedRows, reason: str) -> None:
    """KV that was to arrive during the forward did not, so all of the request is computed: the reply says so."""
    state = due.state
    assert state is not None
    assert state.plan is not None
    assert chunks.landings is not None
    for layer_copy in due.layer_copies:
        chunks.landings.fail(layer_copy.landing)
    logger.warning("Chunk cache: %s is computed in full, a chunk did not arrive (%s)", req.rid, reason)
    state.reported = state.plan = chunks.manager.without_load(state.plan, reason)
    state.selection_report = None
    chunks.metrics.count_fallback(reason)


def _timing(
    chunks: ChunkRuntime, batch: ScheduleBatch, due: Sequence[AddedRows]
) -> contextlib.AbstractContextManager[None] | None:
    if chunks.tiers is None and not any(state_of(req) for req in batch.reqs):
        return None
    num_due = sum(len(one.positions) for one in due)
    num_asking = sum(one.plan.num_asking for one in due if one.plan is not None)
    return chunks.clock.measuring(num_due + num_asking + batch.extend_num_tokens, int(batch.seq_lens_cpu.max()))


def _init_parts(
    original: Callable[..., ForwardBatch],
    cls: type,
    batch: ScheduleBatch,
    model_runner: ModelRunner,
    chunks: ChunkRuntime,
    kwargs: dict[str, Any],
    due: list[AddedRows],
) -> list[Part]:
    """The forwards of a fused batch: one, or several where the only request that prefills has too many rows for a step.

    A row depends on rows in front of it only, so rows that are known before the forward may be cut anywhere.
    """
    build = partial(_init_fused, original, cls, model_runner=model_runner, chunks=chunks, kwargs=kwargs)
    one, *decoding = due
    tails_len = sum(batch.extend_lens)
    most = step_len()
    is_known = one.plan is None or one.plan.selection is None
    is_alone = len(decoding) == _num_decoding(batch)
    if most is None or not is_alone or not is_known or len(one.positions) + tails_len <= most:
        return [build(batch, due)]
    num_before = len(one.positions) - max(most - tails_len, 0)
    *firsts, last = np.split(one.positions, [*range(most, num_before, most), num_before])
    without_tails = copy.copy(batch)
    without_tails.prefix_lens = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    without_tails.extend_lens = without_tails.extend_logprob_start_lens = [0] * len(due)
    without_tails.return_logprob = False
    parts: list[Part] = []
    begin, first = one.load_start, None
    for positions in firsts:
        end, due = int(positions[-1]) + 1, [replace(one, positions=positions, load_start=begin), *decoding]
        parts.append(build(without_tails, due, end=end, first=first))
        begin, first = end, parts[0]
    return [*parts, build(batch, [replace(one, positions=last, load_start=begin), *decoding], first=first)]


def _num_decoding(batch: ScheduleBatch) -> int:
    """Requests at the end of a mixed batch (`--enable-mixed-chunk`) that decode: an extend of one token each."""
    return len(batch.decoding_reqs or ())


def _init_fused(
    original: Callable[..., ForwardBatch],
    cls: type,
    batch: ScheduleBatch,
    due: list[AddedRows],
    *,
    model_runner: ModelRunner,
    chunks: ChunkRuntime,
    kwargs: dict[str, Any],
    end: int | None = None,
    first: Part | None = None,
) -> Part:
    """One forward; `end` of the rows where they do not reach up to the extend's, `first` of the parts of its batch."""
    begins = [
        prefix_len if one.load_start is None else one.load_start
        for one, prefix_len in zip(due, batch.prefix_lens, strict=True)
    ]
    draft = chunks.assembler.draft if model_runner.is_draft_worker else None
    observers = () if draft is not None else _observers(batch, model_runner, chunks, begins, end)
    kernel = chunks.kernel if draft is None else draft.kernel
    rows_stay = [one.plan is None or one.plan.selection is None for one in due]
    positions = _positions(batch, due)
    pool_rows = batch.req_pool_indices_cpu.tolist()
    runs, are_served = _runs_for_backend(positions, pool_rows, rows_stay, model_runner, chunks.min_run_len)
    extra = () if runs is None else runs.arrays()
    fused_batch, row_positions, uploaded = _with_rows(batch, due, positions, extra, model_runner.device)
    if draft is not None:
        fused_batch.input_ids = _one_ahead(batch, fused_batch, positions)
    forward_batch = original(cls, fused_batch, model_runner, **kwargs)
    forward_batch.positions = row_positions.to(forward_batch.positions.dtype)
    kv_pool, row_lens = model_runner.token_to_kv_pool, fused_batch.extend_lens
    beside = None
    if runs is not None:
        if draft is None:
            chunks.metrics.count_fused_batch("sglang")
        stock_forward = model_runner.attn_backend.forward
        by_runs = BackendRuns(runs, uploaded, row_positions, row_lens, kv_pool, stock_forward)
        if all(are_served):
            return Part(forward_batch, by_runs, observers)
        slots = torch.cat([*itertools.compress(fused_batch.out_cache_loc.split(row_lens), are_served)])
        beside = StockServedRequests(are_served, by_runs, slots)
    if draft is None:
        chunks.metrics.count_fused_batch(kernel)
    if first is not None and isinstance(first.attention, FusedRows):
        rows = replace(first.attention, row_positions=row_positions, row_lens=row_lens, beside=beside)
    else:
        rows = FusedRows.build(
            req_to_token=model_runner.req_to_token_pool.req_to_token,
            req_pool_indices=pool_rows,
            kv_lens=batch.seq_lens_cpu.tolist(),
            row_lens=row_lens,
            row_positions=row_positions,
            kv_pool=kv_pool,
            kernel=kernel,
            beside=beside,
        )
    attention = rows if all(rows_stay) else _layerwise(batch, due, rows, model_runner, chunks)
    return Part(forward_batch, attention, observers)


def _runs_for_backend(
    positions: list[np.ndarray],
    pool_rows: list[int],
    rows_stay: list[bool],
    model_runner: ModelRunner,
    min_run_len: int | None,
) -> tuple[Runs | None, list[bool]]:
    """What SGLang's backend serves of a batch, and of each request whether that is it; None: nothing."""
    if min_run_len is not None:
        runs, are_served = Runs.worthwhile(positions, pool_rows, rows_stay, min_run_len)
        # Beside our kernel Q of latent attention comes in one piece, which not every backend takes.
        is_possible = all(are_served) or (any(are_served) and not is_latent(model_runner.token_to_kv_pool))
        if is_possible and runs.fit(model_runner.req_to_token_pool.size):
            return runs, are_served
    return None, [False for _ in positions]


def _first_rows(batch: ScheduleBatch) -> tuple[tuple[int, Candidate], ...]:
    """Requests to verify whose prompt ends in this forward, with their places in the batch."""
    return tuple(
        (i, state.candidate)
        for i, req in enumerate(batch.reqs)
        if (state := state_of(req)) is not None
        and state.candidate is not None
        and req.extend_end == len(req.origin_input_ids)
    )


def _take_due_rows(batch: ScheduleBatch) -> list[AddedRows] | None:
    """What is due per request of the batch; None where no request was loaded since its last forward."""
    due = []
    is_any_due = False
    for req in batch.reqs:
        state = state_of(req)
        if state is None or not state.load_due:
            due.append(_NOTHING_DUE)
            continue
        is_any_due = True
        assert state.plan is not None
        due.append(AddedRows(_load_rows(state.plan), state, state.layer_copies, state.plan.load_start))
        state.complete_rows()
    return due if is_any_due else None


def _load_rows(plan: RecomputePlan) -> np.ndarray:
    if not plan.num_late_rows:
        return plan.row_positions
    reused = np.concatenate([np.arange(c.dst_start, c.dst_end) for c in plan.chunks if c.num_reused])
    return np.sort(np.concatenate([plan.row_positions, reused[: plan.num_late_rows]]))


def _layerwise(
    batch: ScheduleBatch, due: list[AddedRows], rows: FusedRows, model_runner: ModelRunner, chunks: ChunkRuntime
) -> LayerwiseForward:
    """The forward of a batch in which at least one request has something to choose or to drop."""
    tp_size = get_tp_group().world_size
    choosing = {i: one.plan for i, one in enumerate(due) if one.plan is not None and one.plan.selection is not None}
    asking = {i: plan for i, plan in choosing.items() if plan.num_late_rows}
    # What must be computed in any case asks, without the placeholders.
    first = [
        np.concatenate((plan.row_positions, _extend_positions(batch, i))) if (plan := asking.get(i)) else _NO_ROWS
        for i in range(len(due))
    ]
    prompts = [np.frombuffer(batch.reqs[i].full_untruncated_fill_ids, dtype=np.int64) for i in asking]
    begins = np.cumsum([0, *rows.kv_lens[:-1]])
    first_ids = [ids[first[i]] for i, ids in zip(asking, prompts, strict=True)]
    tables = [Tables.of(plan, rows.kv_lens[i]) for i, plan in choosing.items()]
    uploaded = iter(
        upload(
            [
                *(array for one in tables for array in one),
                *(ids[: plan.load_end] for ids, plan in zip(prompts, asking.values(), strict=True)),
                np.concatenate(first),
                np.concatenate([_NO_ROWS, *first_ids]),
                np.concatenate([own + begin for own, begin in zip(first, begins, strict=True)]),
            ],
            rows.row_positions.device,
        )
    )
    tables_of = {i: Tables(*itertools.islice(uploaded, len(Tables._fields))) for i in choosing}
    prompt_ids = {i: next(uploaded) for i in asking}
    first_positions, ids_on_device, places = uploaded
    first_lens = [len(own) for own in first]
    first_pass = FirstPass(first_lens, first_positions, ids_on_device, rows.kv_indices[places]) if asking else None
    starts = zip(first_positions.split(first_lens), rows.row_positions.split(rows.row_lens), due, strict=True)
    requests: list[RequestProgress] = []
    late: list[LateRows | None] = []
    for i, (asked, positions, one) in enumerate(starts):
        late.append(LateRows(len(one.positions), prompt_ids[i]) if i in asking else None)
        plan = choosing.get(i)
        if plan is None:
            requests.append(RequestProgress.unchanged(positions))
            continue
        assert one.state is not None
        assert plan.selection is not None
        num_tail = batch.extend_lens[i]
        tail_end = batch.prefix_lens[i] + num_tail
        start, end = plan.selection.question
        num_answer = min(max(tail_end - end, 0), num_tail - 1)
        progress = RequestProgress(
            plan,
            tables_of[i],
            asked if i in asking else positions,
            num_question=min(max(tail_end - num_answer - start, 1), num_tail - num_answer),
            num_answer=num_answer,
            num_layers=model_runner.model_config.num_hidden_layers,
            tp_size=tp_size,
            explain=one.state.options.explain,
        )
        if plan is one.state.reported:  # a retracted request's reply speaks of its first forward
            one.state.selection_report = progress.report
        requests.append(progress)
    return LayerwiseForward(rows, requests, late, first_pass, chunks.layers, tp_size, model_runner.lora_manager)


def _positions(batch: ScheduleBatch, due: list[AddedRows]) -> list[np.ndarray]:
    """Positions of the rows that each request computes: those that are due, then its extend."""
    return [np.concatenate((one.positions, _extend_positions(batch, i))) for i, one in enumerate(due)]


def _extend_positions(batch: ScheduleBatch, i: int) -> np.ndarray:
    """Positions of the ordinary extend of request i."""
    return np.arange(batch.prefix_lens[i], batch.prefix_lens[i] + batch.extend_lens[i])


def _with_rows(
    batch: ScheduleBatch, due: list[AddedRows], positions: list[np.ndarray], extra: Sequence[np.ndarray], device: str
) -> tuple[ScheduleBatch, torch.Tensor, list[torch.Tensor]]:
    """A copy of `batch` with the due rows in front of each request's extend, `[num_rows]` positions of all, `extra`.

    Put together on the host and uploaded at once: the number of operations does not grow with the batch.
    """
    req_to_token = batch.req_to_token_pool.req_to_token
    num_prefilling = len(batch.reqs) - _num_decoding(batch)
    ids = [
        np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64)[own]
        for req, own in zip(batch.reqs[:num_prefilling], positions, strict=False)
    ]
    num_decoded = sum(batch.extend_lens[num_prefilling:])
    ids.append(np.zeros(num_decoded, dtype=np.int64))  # the host may not know yet what was decoded
    pool_rows = batch.req_pool_indices_cpu.tolist()
    places = [own + row * req_to_token.shape[1] for own, row in zip(positions, pool_rows, strict=True)]
    row_positions, row_ids, row_places, *uploaded = upload(
        [np.concatenate(one) for one in (positions, ids, places)] + list(extra), device
    )
    num_added = [len(one.positions) for one in due]
    fused = copy.copy(batch)
    fused.input_ids = row_ids.to(batch.input_ids)
    if num_decoded:
        fused.input_ids[-num_decoded:] = batch.input_ids[-num_decoded:]
    fused.out_cache_loc = req_to_token.view(-1).index_select(0, row_places).to(batch.out_cache_loc.dtype)
    fused.extend_lens = [length + added for length, added in zip(batch.extend_lens, num_added, strict=True)]
    # Of these, only the sum with the extend has a meaning.
    fused.prefix_lens = [length - added for length, added in zip(batch.prefix_lens, num_added, strict=True)]
    starts = zip(batch.extend_logprob_start_lens, num_added, strict=True)
    fused.extend_logprob_start_lens = [start + added for start, added in starts]
    fused.extend_num_tokens = sum(fused.extend_lens)
    if batch.replace_positions is not None:  # of other requests: embeddings by index into the flattened input ids
        moved = _moved_indices(batch.extend_lens, fused.extend_lens, device)
        fused.replace_positions = moved[batch.replace_positions]
    return fused, row_positions, uploaded


def _one_ahead(batch: ScheduleBatch, fused: ScheduleBatch, positions: list[np.ndarray]) -> torch.Tensor:
    """`[num_rows]` the token behind each row, which is what a draft is given; behind the last one as in `batch`."""
    ids = [
        np.append(np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64), 0)[own + 1]
        for req, own in zip(batch.reqs, positions, strict=True)
    ]
    has_tail = np.array(batch.extend_lens) > 0
    ends = [np.cumsum(one.extend_lens)[has_tail] - 1 for one in (fused, batch)]
    row_ids, last, last_of_batch = upload([np.concatenate(ids), *ends], fused.input_ids.device)
    row_ids = row_ids.to(fused.input_ids.dtype)
    row_ids[last] = batch.input_ids[last_of_batch]
    return row_ids


def _moved_indices(old_lens: list[int], new_lens: list[int], device: str) -> torch.Tensor:
    """`[sum(old_lens)]` where each token of the flattened extends stands once rows were put in front of them."""
    ends = np.cumsum(new_lens)
    moved = [np.arange(end - old, end) for old, end in zip(old_lens, ends, strict=True)]
    return upload([np.concatenate(moved)], device)[0]
