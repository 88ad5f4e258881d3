"""ForwardBatch: rows that are due stand in front of an ordinary extend.

Verb (handler of a hook): `init_forward_batch` adds the rows that are due to the batch that the model sees, and
announces the forward to `host/model_runner.py`. A draft model computes the same rows after the target
(`start/draft_model`).

Promises: the scheduler's batch is never changed (`forward/batch/row_arrays`). Logits are taken from the last row, which
is the last token of the ordinary extend.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from chunk_cache.gate.verification_queue import Candidate
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.added_rows import NOTHING_ADDED, AddedRows, take_added_rows
from sglang_chunk_cache.forward.attending import Observer
from sglang_chunk_cache.forward.batch.fused_batch import FusedBatch, States
from sglang_chunk_cache.forward.batch.row_arrays import positions_of
from sglang_chunk_cache.forward.batch.state_rows import state_forward
from sglang_chunk_cache.forward.forward import Forward, Part, announce
from sglang_chunk_cache.forward.kept_chooser import KeptChooser
from sglang_chunk_cache.forward.statistics_taker import StatisticsTaker
from sglang_chunk_cache.kv.partial_load import PartialLoads
from sglang_chunk_cache.request.chunk_request import state_of
from sglang_chunk_cache.start.runtime import ChunkRuntime, runtime_of
from sglang_chunk_cache.telemetry.stages import stage

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def init_forward_batch(
    original: Callable[..., ForwardBatch], cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **kwargs: Any
) -> ForwardBatch:
    """AROUND `ForwardBatch.init_new`."""
    chunks = runtime_of(batch.tree_cache)
    if chunks is None:
        return original(cls, batch, model_runner, **kwargs)
    if not batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        forward_batch = original(cls, batch, model_runner, **kwargs)
        if batch.forward_mode.is_decode():
            _move_to_true_positions(forward_batch, batch)
        return forward_batch

    def init(fused: ScheduleBatch) -> ForwardBatch:
        return original(cls, fused, model_runner, **kwargs)

    fused = partial(FusedBatch, batch=batch, model_runner=model_runner, init=init, min_run_len=chunks.min_run_len)
    draft = chunks.assembler.draft
    if model_runner.is_draft_worker:
        added = None if draft is None else chunks.target_forwards.take(batch)
        if draft is None or added is None:
            return init(batch)
        kwargs["kv_loc_plan"] = None  # SGLang's plan is for the rows of the target's last forward
        return announce(_draft_forward(fused(kernel=draft.kernel), added))
    forward = _target_forward(fused, batch, model_runner, chunks, init)
    if draft is not None:
        chunks.target_forwards.note(batch, forward)
    return announce(forward)


def _target_forward(
    fused_batch: Callable[..., FusedBatch],
    batch: ScheduleBatch,
    model_runner: ModelRunner,
    chunks: ChunkRuntime,
    init: Callable[[ScheduleBatch], ForwardBatch],
) -> Forward:
    if chunks.pool.has_copies:
        loading = [req for req in batch.reqs if (s := state_of(req)) and s.admission.load is not None]
        with stage(chunks.metrics, "assembling", loading):
            chunks.pool.flush()
    added = take_added_rows(batch)
    first_rows = () if chunks.gate is None else _first_rows(batch)
    observe = partial(_observers, model_runner, chunks)
    states_of = _states_of(chunks)
    if added is None:
        timing, observers = _timing(chunks, batch, ()), observe(batch, batch.prefix_lens, None)
        states = None
        if states_of is not None:
            none = [NOTHING_ADDED] * len(batch.reqs)
            states = states_of(batch, none, positions_of(batch, none))
        return Forward((Part(init(batch), None, observers, states),), timing=timing, first_rows=first_rows)
    count = partial(chunks.metrics.add, "fused_batches")
    fused = fused_batch(kernel=chunks.kernel, layers=chunks.layers, observe=observe, states=states_of, count=count)
    parts = fused.parts(added)
    if batch.global_num_tokens is not None:
        told = batch.global_num_tokens[get_parallel().attn_dp_rank]
        assert [part.batch.extend_num_tokens for part in parts] == [told], "ranks compute as many rows as they told"
    forward = partial(Forward, parts, added, tail_lens=_tail_lens(batch), first_rows=first_rows)
    copies = [layer_copy for one in added for layer_copy in one.layer_copies]
    if chunks.partial_loads is None or not copies:
        return forward(timing=_timing(chunks, batch, added))
    # Not timed: a forward that waits for layers does not show how long computing takes.
    instead = partial(_without_loads, fused, chunks, chunks.partial_loads, added)
    return forward(loads=chunks.partial_loads.loads(copies), instead=instead)


def _states_of(chunks: ChunkRuntime) -> States | None:
    transitions = chunks.store.transitions
    if chunks.states is None or transitions is None:
        return None
    return partial(state_forward, chunks.states, transitions, chunks.manager.has_whole)


def _draft_forward(fused: FusedBatch, added: Sequence[AddedRows]) -> Forward:
    """The draft model's forward of a prompt, after the target's forward of the same batch.

    SGLang's `_draft_extend_for_prefill` asks for it, with the hidden states of the target's rows where the draft reads
    them.
    """
    parts = fused.parts([one.for_draft() for one in added])
    batches = [part.batch for part in parts]
    hidden = fused.batch.spec_info.hidden_states
    if len(parts) > 1 and hidden is not None:
        for one, own in zip(batches, hidden.split([one.extend_num_tokens for one in batches]), strict=True):
            one.spec_info = copy.copy(one.spec_info)
            one.spec_info.hidden_states = own
    return Forward(parts)


def _without_loads(
    fused: FusedBatch, chunks: ChunkRuntime, partial_loads: PartialLoads, added: Sequence[AddedRows], reason: str
) -> Forward:
    """The same batch again, with every token computed in requests whose layers were still to arrive, and in those that
    choose by how much KV changes: the first attempt has changed it."""
    batch = fused.batch
    for req, one in zip(batch.reqs, added, strict=True):
        if one.load is None or one.state is None or not one.is_spoilt:
            continue
        for layer_copy in one.layer_copies:
            partial_loads.fail(layer_copy.partial)
        logger.warning("Chunk cache: %s is computed in full, a chunk did not arrive (%s)", req.rid, reason)
        plan = one.state.admission.plan
        assert plan is not None
        one.state.fail_load(chunks.manager.without_load(plan, reason, one.load.plan.load_start))
        chunks.metrics.add("fallbacks", reason)
    parts = fused.parts([one.everything() if one.is_spoilt else one for one in added])
    return Forward(parts, tail_lens=_tail_lens(batch))


def _tail_lens(batch: ScheduleBatch) -> tuple[int, ...] | None:
    """Lengths of the ordinary extends, of which hidden states are returned; None for EAGLE, which needs all rows."""
    return None if batch.spec_algorithm.is_eagle() else tuple(batch.extend_lens)


def _move_to_true_positions(forward_batch: ForwardBatch, batch: ScheduleBatch) -> None:
    """Corrects positions of packed requests: SGLang counts slots, of which they have fewer than tokens."""
    num_dropped = [0 if (state := state_of(req)) is None else state.packing.num_dropped for req in batch.reqs]
    if not any(num_dropped):
        return
    deltas = [
        0 if (inputs := req.multimodal_inputs) is None else int(inputs.mrope_position_delta) for req in batch.reqs
    ]
    num_beams = len(forward_batch.positions) - len(num_dropped)  # behind the requests; beams are never packed
    table = np.pad(np.array([num_dropped, deltas], dtype=np.int64), ((0, 0), (0, num_beams)))
    dropped, delta = upload([*table], forward_batch.positions.device)
    positions = forward_batch.positions + dropped
    if forward_batch.mrope_positions is not None:
        # SGLang took that of the token of the prompt whose place is the number of slots.
        forward_batch.mrope_positions = torch.where(dropped > 0, positions + delta, forward_batch.mrope_positions)
    forward_batch.positions = positions.to(forward_batch.positions.dtype)


def _observers(
    model_runner: ModelRunner,
    chunks: ChunkRuntime,
    batch: ScheduleBatch,
    begins: Sequence[int],
    ends: Sequence[int] | None,
) -> tuple[Observer, ...]:
    """Observers of what a forward computes of each request, from `begins` to `ends` (None: the end of its extend)."""
    if ends is None:
        ends = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    spans = list(zip(begins, ends, strict=True))
    kv_pool = model_runner.token_to_kv_pool
    statistics = StatisticsTaker.plan(batch, chunks.statistics_layers, kv_pool, chunks.kernel, spans)
    kept = KeptChooser.plan(batch, kv_pool, chunks.kernel, model_runner.model_config.num_hidden_layers)
    return tuple(one for one in (statistics, kept) if one is not None)


def _timing(
    chunks: ChunkRuntime, batch: ScheduleBatch, added: Sequence[AddedRows]
) -> contextlib.AbstractContextManager[None] | None:
    if chunks.tiers is None and not any(state_of(req) for req in batch.reqs):
        return None
    num_layers = len(chunks.layers.modules)
    num_rows = sum(len(one.positions) + one.num_asking(num_layers) for one in added) + batch.extend_num_tokens
    return chunks.clock.measuring(num_rows, int(batch.seq_lens_cpu.max()))


def _first_rows(batch: ScheduleBatch) -> tuple[tuple[int, Candidate], ...]:
    """Requests to verify whose prompt ends in this forward, with their places in the batch."""
    return tuple(
        (i, state.verification.candidate)
        for i, req in enumerate(batch.reqs)
        if (state := state_of(req)) is not None
        and state.verification.candidate is not None
        and req.extend_end == len(req.origin_input_ids)
    )
