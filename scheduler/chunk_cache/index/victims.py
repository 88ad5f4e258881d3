"""Victim orders: which variant is evicted first when the index is full.

    LruOrder         derived, then prepared, then exact ones, each least recently used first
    FrequencyOrder   least worth first; of equal worth exact ones last, each least recently used first. The worth of a
                     variant is its reuse frequency f_r plus the age at its last use. The age is at least the worth of
                     the last victim, and grows when the store that holds the KV is turned over. (Cache-Craft section
                     3.3 evicts by lowest f_r. The age is that of LFU with dynamic aging, Arlitt et al. 2000: without
                     it a new variant goes before any that was ever used, and what was popular once stays for ever.)
                     With an ageing of 0 there is no age, as in the paper.

The owner calls `add`, `touch` and `remove`; `first` names the victim. No clock is read, so every rank agrees.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol, TypeAlias

from chunk_cache.index.variant import Variant

AGEING = 10.0
"""Growth of the age per turnover unless the server's configuration says otherwise: the value that the simulator
found to keep most of the gain where popularity lasts, and to lose next to nothing where it does not."""

_Entry: TypeAlias = tuple[float, bool, int, int]
"""Worth, whether exact, last use, id."""


class VictimOrder(Protocol):
    """All variants of an index, in eviction order."""

    age: float
    """Worth of a new variant; 0 where worth plays no part."""

    def advance_age(self, amount: float) -> None: ...

    def worth(self, variant: Variant) -> float:
        """What the variant is worth now, in the unit of `age`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Variant]:
        """In eviction order, lazily; the order must not change meanwhile."""

    def get(self, variant_id: int) -> Variant | None: ...

    def add(self, variant: Variant) -> None: ...

    def touch(self, variant: Variant) -> None:
        """Notes that `last_use` or `reuse_frequency` have changed."""

    def remove(self, variant: Variant) -> None: ...

    def forget(self, variant: Variant) -> None:
        """Removes a victim."""

    def first(self) -> Variant:
        """The victim; there must be one."""

    def order(self, variant: Variant) -> tuple[float, ...]:
        """Sort key to compare some variants with each other; the smallest goes first."""

    def clear(self) -> None: ...

    def check_integrity(self, clock: int) -> None:
        """Raises an `AssertionError` where the order is not what it should be."""


class LruOrder:
    """See the head of this file; every operation is O(1)."""

    age = 0.0

    def advance_age(self, amount: float) -> None:
        """Recency needs no age."""

    def __init__(self) -> None:
        self._exact: OrderedDict[int, Variant] = OrderedDict()
        self._prepared: OrderedDict[int, Variant] = OrderedDict()
        self._derived: OrderedDict[int, Variant] = OrderedDict()
        self._kinds = self._derived, self._prepared, self._exact

    def __len__(self) -> int:
        return sum(map(len, self._kinds))

    def __iter__(self) -> Iterator[Variant]:
        for kind in self._kinds:
            yield from kind.values()

    def get(self, variant_id: int) -> Variant | None:
        return self._exact.get(variant_id) or self._derived.get(variant_id) or self._prepared.get(variant_id)

    def add(self, variant: Variant) -> None:
        self._kind(variant)[variant.variant_id] = variant

    def touch(self, variant: Variant) -> None:
        self._kind(variant).move_to_end(variant.variant_id)

    def remove(self, variant: Variant) -> None:
        del self._kind(variant)[variant.variant_id]

    forget = remove

    def first(self) -> Variant:
        return next(iter(self))

    def worth(self, variant: Variant) -> float:
        return 0.0

    def order(self, variant: Variant) -> tuple[float, ...]:
        return -variant.generation, variant.is_prepared, variant.last_use

    def clear(self) -> None:
        for kind in self._kinds:
            kind.clear()

    def check_integrity(self, clock: int) -> None:
        for name, kind in zip(("derived", "prepared", "exact"), self._kinds, strict=True):
            previous = 0
            for variant_id, variant in kind.items():
                assert variant.variant_id == variant_id, f"{variant} is listed as {variant_id}"
                assert self._kind(variant) is kind, f"{variant} is listed as {name}"
                assert previous < variant.last_use <= clock, f"{variant} is out of order in {name}"
                previous = variant.last_use

    def _kind(self, variant: Variant) -> OrderedDict[int, Variant]:
        if variant.is_exact:
            return self._exact
        return self._prepared if variant.is_prepared else self._derived


class FrequencyOrder:
    """See the head of this file; every operation is O(log variants), amortised. `age` never falls.

    Args:
        is_aged: whether there is an age.
    """

    def __init__(self, *, is_aged: bool = True) -> None:
        self.age = 0.0
        self._is_aged = is_aged
        self._current: dict[int, tuple[_Entry, Variant]] = {}
        # Stale entries are dropped when they come to the top; entries hold ids, so they keep no variant alive.
        self._heap: list[_Entry] = []

    def advance_age(self, amount: float) -> None:
        assert amount >= 0.0, f"the age falls by {-amount}"
        if self._is_aged:
            self.age += amount

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[Variant]:
        # Every eviction asks for the first few of many, so the heap is walked down, smallest first, and not sorted.
        self._drop_stale(len(self._current) // 64)  # stale entries had less worth, so most would be in front
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            found = self._current.get(entry[3])
            if found is not None and found[0] == entry:
                yield found[1]
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[below], below))

    def get(self, variant_id: int) -> Variant | None:
        found = self._current.get(variant_id)
        return None if found is None else found[1]

    def touch(self, variant: Variant) -> None:
        entry = (self.age + variant.reuse_frequency, variant.is_exact, variant.last_use, variant.variant_id)
        self._current[variant.variant_id] = (entry, variant)
        heapq.heappush(self._heap, entry)
        self._drop_stale(len(self._current))

    add = touch

    def _drop_stale(self, max_stale: int) -> None:
        """Drops stale entries if there are more than `max_stale` + 64."""
        if len(self._heap) > len(self._current) + max_stale + 64:
            self._heap = [entry for entry, _ in self._current.values()]
            heapq.heapify(self._heap)

    def remove(self, variant: Variant) -> None:
        del self._current[variant.variant_id]

    def forget(self, variant: Variant) -> None:
        if self._is_aged:
            self.age = max(self.age, self.worth(variant))
        self.remove(variant)

    def first(self) -> Variant:
        while True:
            found = self._current.get(self._heap[0][3])
            if found is not None and found[0] == self._heap[0]:
                return found[1]
            heapq.heappop(self._heap)

    def worth(self, variant: Variant) -> float:
        return self._current[variant.variant_id][0][0]

    def order(self, variant: Variant) -> tuple[float, ...]:
        return self._current[variant.variant_id][0]

    def clear(self) -> None:
        self._current.clear()
        self._heap.clear()

    def check_integrity(self, clock: int) -> None:
        assert {entry for entry, _ in self._current.values()} <= set(self._heap), "a variant is not in the heap"
        for variant_id, ((worth, is_exact, last_use, of), variant) in self._current.items():
            is_listed = (variant.variant_id, variant.is_exact, of) == (variant_id, is_exact, variant_id)
            assert is_listed, f"{variant} is listed as {variant_id}"
            assert 0 < last_use == variant.last_use <= clock, f"{variant} was used at {last_use}"
            assert variant.reuse_frequency <= worth <= self.age + variant.reuse_frequency + 1e-9, (
                f"{variant} is worth {worth}"
            )


EVICTIONS = ("lru", "frequency-reuse")
"""Names of the orders in `--chunk-cache-config`."""


def victim_order(eviction: str, ageing: float = AGEING) -> VictimOrder:
    """A new order by its name, one of `EVICTIONS`."""
    assert eviction in EVICTIONS, f"unknown eviction {eviction!r}"
    return LruOrder() if eviction == "lru" else FrequencyOrder(is_aged=ageing > 0.0)
