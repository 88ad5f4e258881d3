"""Tables: what the host knows of the reused tokens of one request, where a forward's choices look it up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chunk_cache.plan import RecomputePlan


class Tables(NamedTuple):
    """Made on the host (numpy, int64), then the same on the device. Chunks that reuse nothing have no number."""

    chunk_at: Any
    """`[kv_len]` number of the reused chunk that a position lies in, -1 where it is not reused."""
    reused: Any
    """`[num_reused]` reused positions, ascending."""
    window_at: Any
    """`[kv_len]` window of a reused position (`methods.grouping`); any where it is not reused."""
    window_lens: Any
    """`[num_windows]` tokens of each window."""
    block_at: Any
    """`[kv_len]` block of a reused position (option `block_size`), any where it is not reused; empty without blocks."""
    blocks: Any
    """`[num_blocks, block_size]` the reused positions of each block, `kv_len` in the places of others."""
    bounds: Any
    """`[2, num_chunks]` where every chunk of the prompt begins and ends, at most `kv_len`."""
    ordinals: Any
    """`[num_reused_chunks]` which chunk of the prompt it is."""

    @classmethod
    def of(cls, plan: RecomputePlan, kv_len: int) -> Tables:
        """For a request whose positions up to `kv_len` are computed or there once the forward is done."""
        assert plan.selection is not None
        size = plan.selection.group_size or kv_len
        block_at, blocks = _blocks(plan, kv_len)
        chunk_at = np.full(kv_len, -1, dtype=np.int64)
        window_at = np.zeros(kv_len, dtype=np.int64)
        window_lens: list[int] = []
        hits = [chunk for chunk in plan.chunks if chunk.num_reused]
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


def _blocks(plan: RecomputePlan, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """`Tables.block_at` and `blocks`; blocks are counted from a chunk's first token, like windows."""
    assert plan.selection is not None
    size = plan.selection.block_size
    if not size:
        return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.int64)
    block_at, places, reused, num = np.zeros(kv_len, dtype=np.int64), [], [], 0
    for chunk in plan.chunks:
        if chunk.num_reused:
            reused.append(np.arange(chunk.dst_start, chunk.dst_end))
            own, place = np.divmod(reused[-1] - chunk.start, size)
            block_at[reused[-1]] = own - own[0] + num
            num += own[-1] - own[0] + 1
            places.append(place)
    positions = np.concatenate(reused)
    blocks = np.full((num, size), kv_len, dtype=np.int64)
    blocks[block_at[positions], np.concatenate(places)] = positions
    return block_at, blocks
