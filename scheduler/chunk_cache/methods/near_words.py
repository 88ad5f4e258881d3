"""Rows at words of the question, beside the first tokens of passages near it."""

from __future__ import annotations

import numpy as np

from chunk_cache.methods.base import AllReused, Basis, Rows
from chunk_cache.methods.fixed import Near, take_first
from chunk_cache.methods.ranked import best, block_means


class NearWords(Near):
    """Two thirds of the rows as `near`, a third around words of the question, the rarest first (*ours*).

    If fewer tokens than that third stand around such words, the remaining rows go to the first tokens left, as by
    `near`. `plan.question_words` says how much a token counts.
    """

    name = "near-words"
    asks_words = True

    def _select_of_all(self, num_rows: int, reused: AllReused) -> Rows:
        is_row = np.zeros(reused.num_tokens, dtype=np.bool_)
        num_around = num_rows // 3
        take_first(is_row, num_rows - num_around, reused)
        if reused.ranking is not None and num_around:
            ranking = reused.ranking if reused.blocks is None else block_means(reused.ranking, reused.blocks)
            ranking = np.where(is_row | ~(ranking > 0), np.float32(-np.inf), ranking)
            around = best(ranking, num_around)
            is_row[around[ranking[around] > 0]] = True
        take_first(is_row, num_rows - int(np.count_nonzero(is_row)), reused)
        return np.flatnonzero(is_row)

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        """For one chunk with a budget of its own, by `alpha`."""
        reused = AllReused([(0, num_reused)], num_reused, basis.seed, basis.ranking, basis.blocks)
        return self._select_of_all(num_rows, reused)
