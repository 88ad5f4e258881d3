"""Tables: what the host knows of the reused tokens of one request, for the choices that a forward makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.row_plan import blocks_of


class Tables(NamedTuple):
    """Made on the host (numpy, int64), then uploaded. Only chunks of which something is reused have a number."""

    chunk_at: Any
    """`[kv_len]` number of the reused chunk that a position lies in, -1 where it is not reused."""
    reused: Any
    """`[num_reused]` reused positions, ascending."""
    window_at: Any
    """`[kv_len]` window of a reused position (`methods.grouping`); any number for others."""
    window_lens: Any
    """`[num_windows]` tokens of each window."""
    block_at: Any
    """`[kv_len]` block of a reused position (option `block_size`), any number for others; empty without blocks."""
    blocks: Any
    """`[num_blocks, block_size]` the reused positions of each block, `kv_len` in the places of others."""
    bounds: Any
    """`[2, num_chunks]` where every chunk of the prompt begins and ends, at most `kv_len`."""
    ordinals: Any
    """`[num_reused_chunks]` place of each reused chunk among the chunks of the prompt."""

    @classmethod
    def of(cls, plan: RecomputePlan, kv_len: int) -> Tables:
        """The tables of a request of which positions up to `kv_len` have KV once the forward is done."""
        assert plan.selection is not None
        size = plan.selection.group_size or kv_len
        chunk_at = np.full(kv_len, -1, dtype=np.int64)
        window_at = np.zeros(kv_len, dtype=np.int64)
        window_lens: list[int] = []
        hits = [chunk for chunk in plan.chunks if chunk.num_reused]
        block_at, blocks = _blocks(plan, hits, kv_len)
        for number, chunk in enumerate(hits):
            span = slice(chunk.dst_start, chunk.dst_end)
            chunk_at[span] = number
            window_at[span] = len(window_lens) + (np.arange(chunk.dst_start, chunk.dst_end) - chunk.start) // size
            window_lens += [min(size, chunk.end - at) for at in range(chunk.start, chunk.end, size)]
        return cls(
            chunk_at,
            np.flatnonzero(chunk_at >= 0).astype(np.int64, copy=False),
            window_at,
            np.array(window_lens, dtype=np.int64),
            block_at,
            blocks,
            np.array([[c.start for c in plan.chunks], [c.end for c in plan.chunks]], dtype=np.int64).clip(max=kv_len),
            np.array([i for i, chunk in enumerate(plan.chunks) if chunk.num_reused], dtype=np.int64),
        )


def _blocks(plan: RecomputePlan, hits: Sequence[ChunkPlan], kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """`Tables.block_at` and `blocks`."""
    assert plan.selection is not None
    size = plan.selection.block_size
    if not size:
        return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.int64)
    numbers = blocks_of(hits, size)
    positions = np.concatenate([np.arange(chunk.dst_start, chunk.dst_end) for chunk in hits])
    places = np.concatenate([(np.arange(chunk.dst_start, chunk.dst_end) - chunk.start) % size for chunk in hits])
    block_at = np.zeros(kv_len, dtype=np.int64)
    block_at[positions] = numbers
    blocks = np.full((numbers[-1] + 1, size), kv_len, dtype=np.int64)
    blocks[numbers, places] = positions
    return block_at, blocks
