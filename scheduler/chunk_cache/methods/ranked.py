"""Methods that rank a chunk's tokens by a statistic of its KV (`chunk_cache.index.chunk_statistics`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from chunk_cache.methods.base import Basis, Method, Ranking, Rows
from chunk_cache.methods.method_options import ALPHA, Option


class RankedMethod(Method):
    """The ceil(ratio n) tokens of each chunk with the largest statistic; ties, and tokens without one, by position."""

    own_options: ClassVar[tuple[Option, ...]] = (ALPHA,)

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        ranking = basis.ranking
        if ranking is None:
            return np.arange(num_rows, dtype=np.int64)
        assert len(ranking) == num_reused, f"{len(ranking)} statistics for {num_reused} tokens"
        if basis.blocks is not None:
            ranking = block_means(ranking, basis.blocks)
        if np.isnan(ranking.sum()):  # one value is NaN
            ranking = np.where(np.isnan(ranking), np.float32(-np.inf), ranking)
        return best(ranking, num_rows)


def best(ranking: Ranking, num_rows: int) -> Rows:
    """Sorted offsets of the `num_rows` largest values, at most all; of equal ones the first. No value may be NaN."""
    least = np.partition(ranking, len(ranking) - num_rows)[len(ranking) - num_rows]
    # All that are larger than the least one taken, and of its equals the first ones; no sort of the whole chunk.
    is_chosen = ranking > least
    num_equals = num_rows - np.count_nonzero(is_chosen)
    is_chosen[(ranking == least).nonzero()[0][:num_equals]] = True
    rows: Rows = is_chosen.nonzero()[0].astype(np.int64, copy=False)
    return rows


def block_means(ranking: Ranking, blocks: Rows) -> Ranking:
    """For each token, the mean of the statistics in its block, without NaN; NaN where the block has none."""
    is_known = ~np.isnan(ranking)
    sums = np.bincount(blocks, weights=np.where(is_known, ranking, 0.0))
    nums = np.bincount(blocks, weights=is_known)
    means = np.full(len(sums), np.nan, dtype=np.float32)
    np.divide(sums, nums, out=means, where=nums > 0, casting="same_kind")
    return means[blocks]


class CacheCraft(RankedMethod):
    """Cache-Craft section 3.2.1 (equation 14): the tokens that attended most to what stood in front of their chunk.

    Per token sum_j mass(t -> C_j) over the chunks before its own; where there were none, mass(t -> S).
    """

    name = "cache-craft"
    statistic = "outside"


class H2O(RankedMethod):
    """Prefill-H2O: the tokens that later tokens of their chunk attended to most (heavy hitters, H2O section 4)."""

    name = "h2o"
    statistic = "received"
