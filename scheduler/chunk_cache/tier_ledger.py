"""What one bounded tier (host memory, a disk, a remote store) keeps, decided with ids and byte counts.

    prepare_store    room for an entry: names what has to go; it is counted from here on, but not found
    complete_store   the bytes are written, or not; from here on it is found
    prepare_load     protected from eviction until as many `complete_load`
    complete_load    read, or found corrupt, which discards it
    touch            a use; a load alone is none, because only the caller knows what the use was worth
    pin, unpin       an id is not evicted meanwhile, whether it is there yet or not
    discard, clear   forget; what is being read or written leaves when the last copy is over

The ledger decides, workers copy. The evicted are gone at once, all that is needed or none. No wall clock and no set
order: equal calls give equal results on every rank. A call is O(log entries), amortised over what it evicts.

The orders are those of `chunk_cache.victims` (lru; least aged reuse frequency, Cache-Craft section 3.3), except that
exact and derived entries go alike. Those hold variants and protect none; the heap here holds ids, and what may go.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from chunk_cache.victims import AGEING, EVICTIONS

REFUSALS = ("stored", "writing", "leaving", "too_big", "protected")
"""It is there; being written; discarded, but still being copied; too big for the tier; the rest is pinned or copied."""
COUNTERS = ("hits", "misses", "stores", "failed_stores", "evictions", "evicted_bytes", "discards", "corrupt")
"""Hits and misses are of `prepare_load`; stores are those then found; evictions and discards take what was found."""

_Rank: TypeAlias = tuple[float, int, str]  # worth (0 with lru), last use, id; the smallest goes first


@dataclass(eq=False, slots=True)
class _Entry:
    entry_id: str
    key_hex: str
    num_bytes: int
    frequency: float
    rank: _Rank = (0.0, 0, "")
    state: str = "writing"  # then "stored"; "leaving" once it is discarded
    is_evictable: bool = False
    num_loads: int = 0


class TierLedger:
    """See the head of this file. An entry id is opaque but for what is in front of its first "-": the key's hex.

    Args:
        max_bytes: of all entries, those being written or leaving included; None = unbounded.
        eviction: one of `victims.EVICTIONS`; `ageing`: the age grows by it when `max_bytes` have been evicted.
    """

    def __init__(self, max_bytes: int | None, eviction: str = "lru", ageing: float = AGEING) -> None:
        assert max_bytes is None or max_bytes >= 0, f"a tier of {max_bytes} bytes"
        assert eviction in EVICTIONS, f"unknown eviction {eviction!r}"
        self.max_bytes = max_bytes
        self._limit = math.inf if max_bytes is None else max_bytes
        self.num_bytes = 0
        self.age = 0.0  # what a newcomer is worth; 0 with lru
        self._ageing = ageing if eviction == "frequency-reuse" else None
        self._counters = dict.fromkeys(COUNTERS + tuple(f"refused_{reason}" for reason in REFUSALS), 0)
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[str, dict[str, None]] = {}  # ids that are found
        self._pins: dict[str, int] = {}
        self._evictable_bytes = 0
        self._heap: list[_Rank] = []  # of what may go, and some that are no longer current
        self._clock = 0

    def __len__(self) -> int:
        """How many are found."""
        return self._counters["stores"] - self._counters["evictions"] - self._counters["discards"]

    def __iter__(self) -> Iterator[str]:
        """What is found, in the order in which it goes, protected ones in their place."""
        yield from (rank[2] for rank in sorted(e.rank for e in self._entries.values() if e.state == "stored"))

    def stats(self) -> dict[str, int]:
        """A copy of the counters, which only grow: `COUNTERS`, and "refused_" with each of `REFUSALS`."""
        return dict(self._counters)

    def contains(self, entry_id: str) -> bool:
        return entry_id in self._entries and self._entries[entry_id].state == "stored"

    def entries_of(self, key_hex: str) -> tuple[str, ...]:
        """The variants of a chunk that are found, in the order in which they were stored."""
        return tuple(self._by_key.get(key_hex, ()))

    def prepare_store(self, entry_id: str, num_bytes: int, *, worth: float = 0.0) -> tuple[str, ...] | None:
        """The ids gone for it, first victim first; None = refused (`REFUSALS`). `worth`: its f_r so far."""
        assert min(num_bytes - 1, worth) >= 0, f"{entry_id!r} has {num_bytes} bytes and is worth {worth}"
        refusal = self._refusal(entry_id, num_bytes)
        if refusal is not None:
            self._counters[f"refused_{refusal}"] += 1
            return None
        victims = self._make_room(num_bytes)
        self._entries[entry_id] = _Entry(entry_id, entry_id.partition("-")[0], num_bytes, worth)
        self.num_bytes += num_bytes
        return victims

    def complete_store(self, entry_id: str, ok: bool) -> bool:
        """The write is over; whether the entry is found from now on. One discarded meanwhile is not."""
        entry = self._entries[entry_id]
        assert (entry.state == "stored", entry.num_loads) == (False, 0), f"{entry} is not being written"
        if not ok or entry.state == "leaving":
            self._counters["failed_stores"] += 1
            self._remove(entry)
            return False
        self._counters["stores"] += 1
        entry.state = "stored"
        self._by_key.setdefault(entry.key_hex, {})[entry_id] = None
        self._use(entry)
        return True

    def prepare_load(self, entry_id: str) -> bool:
        """Whether it is found; it is then protected until `complete_load`. Loads of one entry nest."""
        found = self.contains(entry_id)
        self._counters["hits" if found else "misses"] += 1
        if found:
            self._entries[entry_id].num_loads += 1
            self._settle(entry_id)
        return found

    def complete_load(self, entry_id: str, ok: bool) -> None:
        """One read is over; `ok` False where the entry is corrupt: it is found no more."""
        entry = self._entries[entry_id]
        assert entry.num_loads > 0, f"{entry_id!r} is not being read"
        if not ok:
            self._counters["corrupt"] += 1
            self.discard(entry_id)
        entry.num_loads -= 1
        if entry.state == "leaving" and not entry.num_loads:
            self._remove(entry)
        self._settle(entry_id)

    def touch(self, entry_id: str, weight: float = 1.0) -> bool:
        """Count a use worth `weight` of f_r (`reusability.use_weight`); False where it is not found."""
        assert weight >= 0.0, f"a use of {entry_id!r} worth {weight}"
        found = self.contains(entry_id)
        if found:
            self._entries[entry_id].frequency += weight
            self._use(self._entries[entry_id])
        return found

    def pin(self, entry_id: str) -> None:
        """Never evict this id until as many `unpin`; `discard` still takes it."""
        self._pins[entry_id] = self._pins.get(entry_id, 0) + 1
        self._settle(entry_id)

    def unpin(self, entry_id: str) -> None:
        assert entry_id in self._pins, f"{entry_id!r} is not pinned"
        left = self._pins.pop(entry_id) - 1
        if left:
            self._pins[entry_id] = left
        self._settle(entry_id)

    def discard(self, entry_id: str) -> bool:
        """Find it no more; False where it was not there, or is leaving already."""
        entry = self._entries.get(entry_id)
        if entry is None or entry.state == "leaving":
            return False
        if entry.state == "stored":
            self._unlist(entry, "discards")
            if not entry.num_loads:
                self._remove(entry)
        entry.state = "leaving"
        return True

    def clear(self) -> None:
        """Discard everything; pins stay."""
        for entry_id in list(self._entries):
            self.discard(entry_id)

    def check_integrity(self) -> None:
        """Raises an `AssertionError` where the parts contradict each other."""
        entries = list(self._entries.values())
        assert self.num_bytes == sum(e.num_bytes for e in entries) <= self._limit, f"{self.num_bytes} bytes"
        evictable = {e.rank: e.num_bytes for e in entries if e.is_evictable}
        assert self._evictable_bytes == sum(evictable.values()), f"{self._evictable_bytes} bytes may go"
        assert evictable.keys() <= set(self._heap), "what may go is not in the heap"
        assert all(n > 0 for n in self._pins.values()), f"pins {self._pins}"
        found = sorted((e.key_hex, e.entry_id) for e in entries if e.state == "stored")
        assert found == sorted((k, i) for k, ids in self._by_key.items() for i in ids or ("",)), f"not {found} by key"
        assert len(self) == len(found), f"{len(self)} are counted as found"
        for entry in entries:
            assert entry.is_evictable == self._may_go(entry), f"{entry} is listed wrongly"
            assert entry.num_loads == 0 or entry.state != "writing", f"{entry} is read before it is written"
            assert entry.state != "stored" or 0 < entry.rank[1] <= self._clock, f"{entry} is out of order"
            assert entry.rank[0] <= (self._ageing is not None) * (self.age + entry.frequency), f"{entry} is worth more"

    def _may_go(self, entry: _Entry) -> bool:
        return entry.state == "stored" and not entry.num_loads and entry.entry_id not in self._pins

    def _refusal(self, entry_id: str, num_bytes: int) -> str | None:
        if entry_id in self._entries:
            return self._entries[entry_id].state
        if num_bytes > self._limit:
            return "too_big"
        return "protected" if self.num_bytes - self._evictable_bytes + num_bytes > self._limit else None

    def _make_room(self, num_bytes: int) -> tuple[str, ...]:
        victims = []
        while self.num_bytes + num_bytes > self._limit:
            rank = heapq.heappop(self._heap)
            entry = self._entries.get(rank[2])
            if entry is None or not entry.is_evictable or entry.rank != rank:
                continue
            self._unlist(entry, "evictions")
            self._remove(entry)
            victims.append(entry.entry_id)
            self._counters["evicted_bytes"] += entry.num_bytes
            if self._ageing is not None:
                self.age = max(self.age, rank[0]) + self._ageing * entry.num_bytes / self._limit
        return tuple(victims)

    def _use(self, entry: _Entry) -> None:
        self._clock += 1
        entry.rank = (0.0 if self._ageing is None else self.age + entry.frequency, self._clock, entry.entry_id)
        self._settle(entry.entry_id)

    def _settle(self, entry_id: str) -> None:
        """After any change of rank or protection."""
        entry = self._entries.get(entry_id)
        if entry is None:
            return
        self._evictable_bytes += (self._may_go(entry) - entry.is_evictable) * entry.num_bytes
        entry.is_evictable = self._may_go(entry)
        if entry.is_evictable:
            heapq.heappush(self._heap, entry.rank)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [e.rank for e in self._entries.values() if e.is_evictable]
            heapq.heapify(self._heap)

    def _unlist(self, entry: _Entry, counter: str) -> None:
        """It is found no more."""
        self._counters[counter] += 1
        entry.state = "leaving"
        self._settle(entry.entry_id)
        peers = self._by_key[entry.key_hex]
        del peers[entry.entry_id]
        if not peers:
            del self._by_key[entry.key_hex]

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.entry_id]
        self.num_bytes -= entry.num_bytes
