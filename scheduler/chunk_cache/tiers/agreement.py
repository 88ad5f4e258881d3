"""What the tensor-parallel ranks do with a chunk that each of them has searched for: they use what all found alike.

A vote says what one rank found. Ranks that used different variants, or chose rows by different statistics, would
compute different rows. An entry that another rank lacks cannot be completed: it is forgotten, and all ranks write the
chunk again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

UNKNOWN, ABSENT = 0, 1
"""Votes of a rank that has no variant: it has not looked everywhere, or there is none."""


class Verdict(Enum):
    """What becomes of one chunk on each rank: used; not used; not used, and what was found is forgotten."""

    SAME = 0
    DIFFERENT = 1
    OF_NO_USE = 2


def vote_for(name: str, statistics: bytes, *, is_streamed: bool) -> int:
    """The vote of a rank that found a variant; equal on ranks that found the same, and in the same way.

    Args:
        statistics: by which rows are chosen.
        is_streamed: its layers arrive during the forward.
    """
    hasher = hashlib.blake2b(name.encode(), digest_size=7)
    hasher.update(statistics)
    return 2 * (1 + int.from_bytes(hasher.digest(), "big")) + is_streamed


def agree(votes: Sequence[int], reduce_max: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> list[Verdict]:
    """The verdict on each chunk, the same on all ranks.

    Args:
        reduce_max: the element-wise maximum over the ranks; asked once.
    """
    mine = np.array(votes, dtype=np.int64)
    largest, least = np.split(reduce_max(np.concatenate([mine, -mine])), 2)
    least = -least
    is_lost = (least >= ABSENT) & (largest // 2 != least // 2)  # a rank that has not looked everywhere may find it yet
    unlike = np.where(is_lost, Verdict.OF_NO_USE.value, Verdict.DIFFERENT.value)
    return [Verdict(value) for value in np.where(largest == least, Verdict.SAME.value, unlike).tolist()]
