"""Data-parallel attention (`--attn-dp-size`): before a step its ranks tell each other how many tokens each computes.

Handlers of hooks: `prepare_mlp_sync_batch` (rows that are due are counted), `vote_for_prefill_graph` (none replays a
batch with requests of ours). Each rank attends for requests of its own and then computes the layers between for all;
so what it told must be what its forward has, from the first layer to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_chunk_cache.forward.added_rows import num_due_rows
from sglang_chunk_cache.request.chunk_request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def prepare_mlp_sync_batch(
    original: Callable[..., ScheduleBatch | None], local_batch: ScheduleBatch | None, *args: Any, **kwargs: Any
) -> ScheduleBatch | None:
    """AROUND `prepare_mlp_sync_batch_raw`: the others are told of the rows too, which the batch does not have yet."""
    num_rows = 0 if local_batch is None else num_due_rows(local_batch)
    if local_batch is None or not num_rows:
        return original(local_batch, *args, **kwargs)
    num_tokens = local_batch.extend_num_tokens
    local_batch.extend_num_tokens = num_tokens + num_rows
    try:
        return original(local_batch, *args, **kwargs)
    finally:
        local_batch.extend_num_tokens = num_tokens


def vote_for_prefill_graph(original: Callable[..., bool], *, local_batch: ScheduleBatch | None, **kwargs: Any) -> bool:
    """AROUND `_local_prefill_cuda_graph_vote`: with a graph every rank's batch would be padded to its length."""
    if local_batch is not None and any(state_of(req) is not None for req in local_batch.reqs):
        return False
    return original(local_batch=local_batch, **kwargs)
