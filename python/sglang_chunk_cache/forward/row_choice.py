"""Choices among rows on the device: `keep_best`, `block_means`, `keep_where`, `group_mask`,
`chunk_of`; none waits for the device.

The host knows all sizes before; for a mask, the caller brings the count. Ties go to the earlier row, so every
tensor-parallel rank chooses alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keep_best(scores: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The rows with the largest scores, in each piece of the rows by itself.

    Args:
        scores: `[num_rows]`; +inf for rows that must stay.
        pieces: (num_rows, num_kept) of consecutive pieces.

    Returns:
        Ascending indices into the rows, int64 `[sum of num_kept]`.
    """
    kept, at = [], 0
    for num_rows, num_kept in pieces:
        if num_kept == num_rows:
            kept.append(torch.arange(at, at + num_rows, device=scores.device))
        else:
            order = torch.sort(scores[at : at + num_rows], descending=True, stable=True).indices
            kept.append(order[:num_kept].sort().values + at)
        at += num_rows
    assert at == len(scores), f"pieces of {at} rows, {len(scores)} scores"
    return torch.cat(kept)


def block_means(
    scores: torch.Tensor, positions: torch.Tensor, block_at: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """For each row the mean score of the rows of its block, so that `keep_best` keeps whole blocks, the last in part.

    Sums run along a dimension, not by index: a GPU does not promise the order of those.

    Args:
        scores: `[num_rows]` of the rows at these `positions`, which are distinct.
        block_at, blocks: see `selection.tables.Tables`.

    Returns:
        `[num_rows]`; undefined for rows that are in no block.
    """
    at = scores.new_zeros(2, len(block_at) + 1)
    at.index_copy_(1, positions, torch.stack([scores, torch.ones_like(scores)]))
    sums, nums = at[:, blocks].sum(dim=-1)
    return (sums / nums)[block_at[positions]]


def keep_where(mask: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Ascending indices of the `num_kept` true entries of `mask`, int64."""
    return torch.sort(mask.logical_not().to(torch.uint8), stable=True).indices[:num_kept]


def chunk_of(positions: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Which of the ascending, disjoint ranges `[starts, ends)` each position lies in; -1 = none."""
    index = torch.bucketize(positions, starts, right=True) - 1
    inside = (index >= 0) & (positions < ends[index.clamp(min=0)])
    return torch.where(inside, index, -1)


def group_mask(
    window: torch.Tensor, stays: torch.Tensor, window_lens: torch.Tensor, *, size: int, threshold: int
) -> torch.Tensor:
    """Which rows stay: `stays`, and those in windows with more than `threshold` rows per `size` tokens (`grouping`).

    Args:
        window: `[num_rows]` int64, the window that each row lies in.
        stays: bool `[num_rows]`, rows that stay whatever their window, and do not count.
        window_lens: `[num_windows]` int64, tokens of each window: `size`, or fewer at the end of a chunk.

    Returns:
        Bool `[num_rows]`.
    """
    num_selected = torch.zeros_like(window_lens).scatter_add_(0, window, stays.logical_not().to(torch.int64))
    is_kept = num_selected * size > threshold * window_lens
    return stays | is_kept[window]
