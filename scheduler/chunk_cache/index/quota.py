"""Shares: what each partition holds of one bounded place, and the most that it may hold.

    add, remove   note that a partition holds more, or less
    excess        by how much a partition would be above its share
    above         the partitions above their share; num_to_give, least: how much they give up, and keep

The index counts its variants and path tokens in this way, a tier its bytes. The owner of the place makes room; a
partition is named by its `Partition.key`. Nothing depends on the order of a set: equal calls give equal results on
every rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from chunk_cache.keys import name_of_partition

LOOK_SHARE = 1 / 16
"""Least part of its share that a partition above it gives up at a time, since each search may go through all leaves of
the tree: 45 ms for 8,000 leaves of others (SGLang's core in Rust, one core of an AMD EPYC)."""

NUM_SHOWN = 10
"""Partitions that statistics show, of each place."""


class Shares:
    """See the head of this file.

    Args:
        bound: of all partitions together; infinite = there is none.
        share: of the bound that one partition may hold; 1 = there is no quota.
    """

    def __init__(self, bound: float, share: float = 1.0) -> None:
        assert 0.0 < share <= 1.0, f"a share of {share}"
        self.most: float = math.inf if share == 1.0 or math.isinf(bound) else max(1, math.floor(share * bound))
        """Most that one partition may hold."""
        self._held: dict[bytes, int] = {}

    @property
    def is_limited(self) -> bool:
        return not math.isinf(self.most)

    def __len__(self) -> int:
        """How many partitions hold something."""
        return len(self._held)

    @property
    def above(self) -> tuple[bytes, ...]:
        """The partitions that hold more than their share."""
        return tuple(owner for owner, num in self._held.items() if num > self.most)

    @property
    def total(self) -> int:
        """What all partitions hold together."""
        return sum(self._held.values())

    @property
    def least(self) -> int:
        """Least that a partition above its share keeps when it gives some up; only if shares are limited."""
        return int((1 - LOOK_SHARE) * self.most)

    def num_to_give(self, num_needed: int) -> int:
        """How much partitions above their share give up together when room for `num_needed` is needed."""
        if not num_needed or not self.above:
            return 0
        return max(num_needed, int(LOOK_SHARE * self.most))

    def held(self, owner: bytes) -> int:
        return self._held.get(owner, 0)

    def excess(self, owner: bytes, num_more: int = 0) -> float:
        """By how much a partition would be above its share with `num_more` more; not positive if it would not be."""
        return self.held(owner) + num_more - self.most

    def add(self, owner: bytes, amount: int) -> None:
        self._set(owner, self.held(owner) + amount)

    def remove(self, owner: bytes, amount: int) -> None:
        assert amount <= self.held(owner), f"{amount} leave {name_of_partition(owner)}, which holds {self.held(owner)}"
        self._set(owner, self.held(owner) - amount)

    def clear(self) -> None:
        self._held.clear()

    def largest(self) -> dict[str, int]:
        """What the largest `NUM_SHOWN` partitions hold, by name, the largest first."""
        found = heapq.nsmallest(NUM_SHOWN, ((-num, owner) for owner, num in self._held.items()))
        return {name_of_partition(owner): -num for num, owner in found}

    def check_integrity(self, expected: Mapping[bytes, int]) -> None:
        """Compares with what was counted from scratch.

        Raises:
            AssertionError: they differ.
        """
        counted = {owner: num for owner, num in expected.items() if num}
        assert self._held == counted, f"partitions hold {self._held}, from scratch {counted}"

    def _set(self, owner: bytes, num: int) -> None:
        if num:
            self._held[owner] = num
        else:
            self._held.pop(owner, None)
