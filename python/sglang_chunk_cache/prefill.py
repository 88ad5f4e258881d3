"""Fused prefill: an extend with chosen rows in front.

Verbs (handlers of hooks): `init_forward_batch` (adds the rows that are due to the batch that the model sees),
`forward` (announces the rows to the attention for the time of one forward).

Promises: the scheduler's batch is never changed; the model sees a copy in which a fused request simply extends by more
tokens. All lengths of that copy agree, so whatever SGLang derives from them (logit positions, LoRA segments, padding
counts) is right; only the positions of the added rows are scattered, and they are replaced afterwards. Logits are taken
from the last row, which is the last token of the ordinary extend.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_chunk_cache.attention.rows import FusedRows, attend_rows
from sglang_chunk_cache.request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_ROWS = "fused_rows"


def init_forward_batch(
    original: Callable[..., ForwardBatch], cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **kwargs: Any
) -> ForwardBatch:
    """AROUND `ForwardBatch.init_new`."""
    due = _take_due_rows(batch)
    if due is None:
        return original(cls, batch, model_runner, **kwargs)
    device = model_runner.device
    fused_batch, positions = _with_rows(batch, due, device)
    forward_batch = original(cls, fused_batch, model_runner, **kwargs)
    forward_batch.positions = positions.to(forward_batch.positions.dtype)
    rows = FusedRows.build(
        req_to_token=model_runner.req_to_token_pool.req_to_token,
        req_pool_indices=batch.req_pool_indices_cpu.tolist(),
        kv_lens=batch.seq_lens_cpu.tolist(),
        row_lens=fused_batch.extend_lens,
        row_positions=positions,
        kv_pool=model_runner.token_to_kv_pool,
    )
    setattr(forward_batch, _ROWS, rows)
    return forward_batch


def forward(
    original: Callable[..., Any], model_runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `ModelRunner.forward`; a fused batch never runs in a captured prefill graph."""
    rows: FusedRows | None = getattr(forward_batch, _ROWS, None)
    if rows is None:
        return original(model_runner, forward_batch, *args, **kwargs)
    graph_runner, model_runner.prefill_cuda_graph_runner = model_runner.prefill_cuda_graph_runner, None
    try:
        with attend_rows(rows):
            return original(model_runner, forward_batch, *args, **kwargs)
    finally:
        model_runner.prefill_cuda_graph_runner = graph_runner


def _take_due_rows(batch: ScheduleBatch) -> list[np.ndarray | None] | None:
    """Row positions per request of the batch; None where no request was loaded since its last forward."""
    if batch.forward_mode.is_decode_or_idle():
        return None
    due: list[np.ndarray | None] = []
    for req in batch.reqs:
        state = state_of(req)
        if state is None or not state.load_due:
            due.append(None)
            continue
        due.append(state.rows_due)
        state.complete_rows()
    return due if any(rows is not None for rows in due) else None


def _with_rows(batch: ScheduleBatch, due: list[np.ndarray | None], device: str) -> tuple[ScheduleBatch, torch.Tensor]:
    """A copy of `batch` with the due rows in front of each request's extend, and `[num_rows]` positions of all rows."""
    req_to_token = batch.req_to_token_pool.req_to_token
    pool_indices = batch.req_pool_indices_cpu.tolist()
    input_ids, out_locs, positions = [], [], []
    extend_lens, prefix_lens, logprob_starts = [], [], []
    begin = 0
    for i, req in enumerate(batch.reqs):
        end = begin + batch.extend_lens[i]
        added = due[i] if due[i] is not None else ()
        if len(added):
            token_ids = np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64)[added]
            rows = torch.from_numpy(added).to(device, non_blocking=True)
            input_ids.append(torch.from_numpy(token_ids).to(batch.input_ids.device, batch.input_ids.dtype))
            out_locs.append(req_to_token[pool_indices[i], rows].to(batch.out_cache_loc.dtype))
            positions.append(rows)
        input_ids.append(batch.input_ids[begin:end])
        out_locs.append(batch.out_cache_loc[begin:end])
        positions.append(torch.arange(batch.prefix_lens[i], batch.prefix_lens[i] + end - begin, device=device))
        extend_lens.append(len(added) + end - begin)
        prefix_lens.append(batch.prefix_lens[i] - len(added))  # only the sum with the extend has a meaning
        logprob_starts.append(batch.extend_logprob_start_lens[i] + len(added))
        begin = end
    fused = copy.copy(batch)
    fused.input_ids = torch.cat(input_ids)
    fused.out_cache_loc = torch.cat(out_locs)
    fused.extend_lens = extend_lens
    fused.prefix_lens = prefix_lens
    fused.extend_logprob_start_lens = logprob_starts
    fused.extend_num_tokens = sum(extend_lens)
    if batch.replace_positions is not None:  # of other requests: embeddings by index into the flattened input ids
        fused.replace_positions = _moved_indices(batch.extend_lens, extend_lens, device)[batch.replace_positions]
    return fused, torch.cat(positions)


def _moved_indices(old_lens: list[int], new_lens: list[int], device: str) -> torch.Tensor:
    """`[sum(old_lens)]` where each token of the flattened extends stands once rows were put in front of them."""
    ends = np.cumsum(new_lens)
    return torch.cat([torch.arange(end - old, end, device=device) for old, end in zip(old_lens, ends, strict=True)])
