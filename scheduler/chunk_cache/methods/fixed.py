"""Methods that need no scores of tokens: all, none, the first tokens, or tokens drawn by lot."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from chunk_cache.methods.base import AllReused, Basis, Method, Rows, num_rows_at
from chunk_cache.methods.method_options import ALPHA, ENDS, IntOption, Options


class FullReuse(Method):
    """Position shift only: nothing is recomputed."""

    name = "full-reuse"

    def effective_ratio(self, requested: float | None, default: float) -> float:
        return 0.0


class Full(Method):
    """Everything is recomputed: what every method is at ratio 1.0."""

    name = "full"

    def effective_ratio(self, requested: float | None, default: float) -> float:
        return 1.0


class Epic(Method):
    """LegoLink (EPIC): the first ceil(ratio n) tokens, where a chunk's false attention sink lies."""

    name = "epic"
    own_options = (ALPHA,)

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        return np.arange(num_rows, dtype=np.int64)


class Near(Epic):
    """The first tokens of each chunk: many of a chunk in front of the question, few of one far away (*ours*).

    Whatever passages say, a question attends to a token about as 1 / (its distance + `_REACH`); a chunk's share of the
    rows is the sum of that over its reused tokens, and what is too much for one goes to the next.
    """

    name = "near"

    def shares_budget(self, options: Options) -> bool:
        return True

    def _select_of_all(self, num_rows: int, reused: AllReused) -> Rows:
        is_row = np.zeros(reused.num_tokens, dtype=np.bool_)
        take_first(is_row, num_rows, reused)
        return np.flatnonzero(is_row)


def take_first(is_row: npt.NDArray[np.bool_], num_rows: int, reused: AllReused) -> None:
    """Marks `num_rows` more tokens as rows, spread as `Near` does: in each chunk the first that are not rows yet.

    Args:
        is_row: `[num_tokens]`, changed in place.
    """
    parts = np.split(is_row, np.cumsum(reused.lens)[:-1])
    rooms = [len(part) - int(np.count_nonzero(part)) for part in parts]
    for part, count in zip(parts, _spread(reused, num_rows, rooms), strict=True):
        part[np.flatnonzero(~part)[:count]] = True


def _spread(reused: AllReused, num_rows: int, rooms: Sequence[int]) -> list[int]:
    """How many of `num_rows` each chunk gets, at most its `rooms`, whose sum is at least `num_rows`."""
    end = reused.question_start + _REACH
    weights = [math.log((end - first) / (end - last)) for first, last in reused.spans]
    left, counts = num_rows, [0] * len(rooms)
    # Nearest first, as its share of its own tokens is the largest: what is too much for it goes to the next.
    for i, rest in reversed([*enumerate(accumulate(weights))]):
        counts[i] = min(rooms[i], math.ceil(left * (weights[i] / rest)))
        left -= counts[i]
    for i in reversed(range(len(rooms))):  # where a far one has less room than its share
        more = min(rooms[i] - counts[i], left)
        counts[i] += more
        left -= more
    return counts


_REACH = 16
"""Tokens right in front of the question that count about alike (docs/quality.md)."""


class Seams(Method):
    """The first tokens of each chunk, and whole chunks as far as the ratio reaches (HYPIC; whole chunks *ours*).

    Behind its seam, all or nothing of a chunk is computed again, so that a model with states needs no state within a
    chunk. The chunk with the highest CFO comes first; of equal ones, or without CFO, the one nearest to the question.
    Seams are computed at any ratio.
    """

    name = "seams"

    def shares_budget(self, options: Options) -> bool:
        return True

    def rows_of_all(self, ratio: float, reused: AllReused) -> Rows:
        counts = [min(reused.seam_len, length) for length in reused.lens]
        left = num_rows_at(ratio, reused.num_tokens) - sum(counts)
        cfos = reused.cfos or [None] * len(counts)
        for i in sorted(range(len(counts)), key=lambda i: (cfos[i] or 0.0, i), reverse=True):
            more = reused.lens[i] - counts[i]
            if more <= left:
                counts[i] += more
                left -= more
        starts = accumulate(reused.lens, initial=0)
        return np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=False)])


class LegoLink(Method):
    """LegoLink as A3 runs it: the first and the last tokens of each chunk; of an odd number, one more of the first."""

    name = "lego-link"
    own_options = (ENDS,)

    def tokens_per_chunk(self, options: Options) -> int | None:
        ends = self.option(options, ENDS.name)
        assert isinstance(ends, int)
        return 2 * ends or None

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        num_last = num_rows // 2
        rows = np.arange(num_rows, dtype=np.int64)
        rows[num_rows - num_last :] += num_reused - num_rows
        return rows


SEED = IntOption("seed", default=0, minimum=0, maximum=2**63 - 1)
"""Another seed draws other tokens."""


class Random(Method):
    """Baseline: ceil(ratio n) tokens drawn without replacement, from (seed, chunk key, n) alone.

    With the same seed a larger ratio selects a superset, so that curves over the ratio are not noise.
    """

    name = "random"
    own_options = (SEED, ALPHA)

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        seed = basis.seed.to_bytes(8, "little")
        message = seed + num_reused.to_bytes(8, "little") + basis.chunk_key
        base = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
        if (blocks := basis.blocks) is not None:
            return np.sort(np.argsort(_hash_counters(base, blocks[-1] + 1)[blocks], kind="stable")[:num_rows])
        # the words are all different, so this set is unique whichever algorithm numpy picks
        chosen = np.argpartition(_hash_counters(base, num_reused), num_rows)[:num_rows]
        return np.sort(chosen).astype(np.int64, copy=False)


def _hash_counters(base: int, num: int) -> npt.NDArray[np.uint64]:
    """`num` pseudo-random words, all different: SplitMix64 (Steele et al. 2014), a bijection over a counter.

    Ours rather than numpy's generator: its stream may change between numpy versions, and seeding it costs more.
    """
    words = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
