"""What one bounded tier (host memory, a disk, a remote store) keeps, decided with ids and byte counts.

    prepare_store    room for an entry: names what has to go; it is counted from here on, but not found
    complete_store   the bytes are written, or not; from here on it is found
    note_read        one read is over; what was corrupt is found no more
    touch            a use; a read alone is none
    discard, clear   forget; what is being written leaves when that is over

The ledger decides, workers copy. The evicted are gone at once, all that is needed or none. No wall clock and no set
order: equal calls give equal results on every rank. A call is O(log entries), amortised over what it evicts. A
partition that has its share makes room for its newcomer out of its own.

The orders are those of `chunk_cache.victims` (lru; least aged reuse frequency, Cache-Craft section 3.3), except that
exact and derived entries go alike. Those hold variants and protect none; the heap here holds ids, and what may go.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from chunk_cache.keys import DEFAULT_PARTITION
from chunk_cache.observer import Observer
from chunk_cache.quota import Shares
from chunk_cache.victims import AGEING, EVICTIONS

REFUSALS = ("stored", "writing", "leaving", "too_big", "protected", "partition_share")
"""It is there; being written; discarded while it is written; too big for the tier; the rest is being written; too big
for the share of its partition, or the rest of that is being written."""
COUNTERS = (
    *("hits", "misses", "stores", "failed_stores", "evictions", "share_evictions", "evicted_bytes", "discards"),
    "corrupt",
)
"""Hits and misses are of `note_read`; stores are those then found; evictions and discards take what was found. Share
evictions are those of a partition's own, since it had its share; they are among the evictions."""


class EntryId(NamedTuple):
    """One variant of a chunk in a tier."""

    key: bytes
    """`chunk_key` of the chunk."""
    name: str
    """Tells the variants of one chunk apart."""

    def __str__(self) -> str:
        return f"{self.key.hex()}-{self.name}"


_Rank: TypeAlias = tuple[float, int, EntryId]  # worth (0 with lru), last use, id; the smallest goes first


@dataclass(eq=False, slots=True)
class _Entry:
    entry_id: EntryId
    num_bytes: int
    rank: _Rank
    partition: bytes
    frequency: float = 0.0
    state: str = "writing"  # then "stored", or "leaving" where it is discarded before


class TierLedger:
    """See the head of this file.

    Args:
        max_bytes: of all entries, those being written or leaving included; None = unbounded.
        eviction: one of `victims.EVICTIONS`.
        ageing: the age grows by it when `max_bytes` have been evicted; 0 = there is no age.
        partition_share: of `max_bytes` that the entries of one partition may have.
    """

    def __init__(
        self, max_bytes: int | None, eviction: str = "lru", ageing: float = AGEING, partition_share: float = 1.0
    ) -> None:
        assert max_bytes is None or max_bytes >= 0, f"a tier of {max_bytes} bytes"
        assert eviction in EVICTIONS, f"unknown eviction {eviction!r}"
        self.max_bytes = max_bytes
        self._limit = math.inf if max_bytes is None else max_bytes
        self.num_bytes = 0
        self.quota = Shares(self._limit, partition_share)
        self.age = 0.0  # what a newcomer is worth; 0 with lru
        self._ageing = ageing if eviction == "frequency-reuse" else None
        self._counters = dict.fromkeys(COUNTERS + tuple(f"refused_{reason}" for reason in REFUSALS), 0)
        self._entries: dict[EntryId, _Entry] = {}
        self._by_key: dict[bytes, dict[EntryId, None]] = {}  # ids that are found
        self._stored_bytes = 0
        self._heap: list[_Rank] = []  # of what is found, and some that are no longer current
        self._own_heaps: dict[bytes, list[_Rank]] = {}  # the same of each partition, where there is a quota
        self._writing_bytes: dict[bytes, int] = {}  # of each partition, those that are not found
        self._clock = 0
        self.observer: Observer | None = None
        """Told what is found from now on, and no more; sizes are bytes."""

    def __len__(self) -> int:
        """How many are found."""
        return self._counters["stores"] - self._counters["evictions"] - self._counters["discards"]

    def __iter__(self) -> Iterator[EntryId]:
        """What is found, in the order in which it goes."""
        yield from (rank[2] for rank in sorted(e.rank for e in self._entries.values() if e.state == "stored"))

    def stats(self) -> dict[str, int]:
        """A copy of the counters, which only grow: `COUNTERS`, and "refused_" with each of `REFUSALS`."""
        return dict(self._counters)

    def contains(self, entry_id: EntryId) -> bool:
        return entry_id in self._entries and self._entries[entry_id].state == "stored"

    def entries_of(self, key: bytes) -> tuple[EntryId, ...]:
        """The variants of a chunk that are found, in the order in which they were stored."""
        return tuple(self._by_key.get(key, ()))

    def first_of(self, entry_ids: Iterable[EntryId]) -> EntryId:
        """Of entries that are found, that which goes first."""
        return min(entry_ids, key=lambda entry_id: self._entries[entry_id].rank)

    def frequency_of(self, entry_id: EntryId) -> float:
        """Reuse frequency f_r of an entry that is found."""
        return self._entries[entry_id].frequency

    def prepare_store(
        self, entry_id: EntryId, num_bytes: int, frequency: float = 0.0, partition: bytes = DEFAULT_PARTITION
    ) -> tuple[EntryId, ...] | None:
        """The ids gone for it, first victim first; None = refused (`REFUSALS`, see `refusal`).

        Args:
            frequency: f_r that it comes with.
            partition: the `partition_key` of its chunk.
        """
        assert num_bytes > 0, f"{entry_id} has {num_bytes} bytes"
        refusal = self.refusal(entry_id, num_bytes, partition)
        if refusal is not None:
            self._counters[f"refused_{refusal}"] += 1
            return None
        victims = self._make_room(num_bytes, partition)
        self._entries[entry_id] = _Entry(entry_id, num_bytes, (0.0, 0, entry_id), partition, frequency)
        self.num_bytes += num_bytes
        self.quota.add(partition, num_bytes)
        self._note_writing(partition, num_bytes)
        return victims

    def complete_store(self, entry_id: EntryId, ok: bool) -> bool:
        """The write is over; whether the entry is found from now on. One discarded meanwhile is not."""
        entry = self._entries[entry_id]
        assert entry.state != "stored", f"{entry} is not being written"
        if not ok or entry.state == "leaving":
            self._counters["failed_stores"] += 1
            self._remove(entry)
            return False
        self._counters["stores"] += 1
        entry.state = "stored"
        self._note_writing(entry.partition, -entry.num_bytes)
        self._stored_bytes += entry.num_bytes
        self._by_key.setdefault(entry_id.key, {})[entry_id] = None
        self._use(entry)
        if self.observer is not None:
            self.observer.stored(*entry_id, entry.partition, entry.num_bytes)
        return True

    def note_read(self, entry_id: EntryId, *, is_corrupt: bool) -> None:
        """One read is over: a hit where the entry is found here, else a miss. What is corrupt is found no more."""
        is_hit = self.contains(entry_id)
        self._counters["hits" if is_hit else "misses"] += 1
        if is_hit and is_corrupt:
            self._counters["corrupt"] += 1
            self.discard(entry_id)

    def touch(self, entry_id: EntryId, weight: float = 1.0) -> bool:
        """Count a use; False where it is not found.

        Args:
            weight: what it adds to f_r (`reusability.use_weight`).
        """
        found = self.contains(entry_id)
        if found:
            self._entries[entry_id].frequency += weight
            self._use(self._entries[entry_id])
        return found

    def note_frequency(self, entry_id: EntryId, frequency: float) -> None:
        """An entry that is found was used elsewhere; its f_r is at least so much."""
        entry = self._entries[entry_id]
        entry.frequency = max(entry.frequency, frequency)
        self._use(entry)

    def discard(self, entry_id: EntryId) -> bool:
        """Find it no more; False where it was not there, or is leaving already."""
        entry = self._entries.get(entry_id)
        if entry is None or entry.state == "leaving":
            return False
        if entry.state == "stored":
            self._take_out(entry, "discards")
        else:
            entry.state = "leaving"
        return True

    def clear(self) -> None:
        """Discard everything."""
        observer, self.observer = self.observer, None
        for entry_id in list(self._entries):
            self.discard(entry_id)
        if observer is not None:
            self.observer = observer
            observer.cleared()

    def check_integrity(self) -> None:
        """Raises an `AssertionError` where the parts contradict each other."""
        entries = list(self._entries.values())
        stored = [e for e in entries if e.state == "stored"]
        assert self.num_bytes == sum(e.num_bytes for e in entries) <= self._limit, f"{self.num_bytes} bytes"
        assert self._stored_bytes == sum(e.num_bytes for e in stored), f"{self._stored_bytes} bytes are found"
        assert {e.rank for e in stored} <= set(self._heap), "what may go is not in the heap"
        held, writing = Counter[bytes](), Counter[bytes]()
        for entry in entries:
            held[entry.partition] += entry.num_bytes
            writing[entry.partition] += entry.num_bytes * (entry.state != "stored")
            if self.quota.is_limited and entry.state == "stored":
                assert entry.rank in self._own_heaps[entry.partition], f"{entry} is not in the heap of its partition"
        self.quota.check_integrity(held)
        assert not self.quota.above, f"partitions above their share: {self.quota.above}"
        assert self._writing_bytes == {p: n for p, n in writing.items() if n}, f"{self._writing_bytes} are written"
        found = sorted(e.entry_id for e in stored)
        assert found == sorted(i for ids in self._by_key.values() for i in ids), f"not {found} by key"
        assert all(ids and all(i.key == key for i in ids) for key, ids in self._by_key.items()), "under another key"
        assert len(self) == len(found), f"{len(self)} are counted as found"
        for entry in stored:
            assert 0 < entry.rank[1] <= self._clock, f"{entry} is out of order"
            assert entry.rank[0] <= (self._ageing is not None) * (self.age + entry.frequency), f"{entry} is worth more"

    def refusal(self, entry_id: EntryId, num_bytes: int, partition: bytes = DEFAULT_PARTITION) -> str | None:
        """Why an entry would not be taken now; None = it would be."""
        if entry_id in self._entries:
            return self._entries[entry_id].state
        if num_bytes > self._limit:
            return "too_big"
        if self._writing_bytes.get(partition, 0) + num_bytes > self.quota.most:
            return "partition_share"
        return "protected" if self.num_bytes - self._stored_bytes + num_bytes > self._limit else None

    def _note_writing(self, partition: bytes, num_bytes: int) -> None:
        self._writing_bytes[partition] = self._writing_bytes.get(partition, 0) + num_bytes
        if not self._writing_bytes[partition]:
            del self._writing_bytes[partition]

    def _make_room(self, num_bytes: int, partition: bytes) -> tuple[EntryId, ...]:
        """What its partition has too much first; nobody else's entries age by that."""
        victims = []
        while self.quota.excess(partition, num_bytes) > 0:
            entry = self._pop_first(self._own_heaps[partition])
            self._evict(entry)
            self._counters["share_evictions"] += 1
            victims.append(entry.entry_id)
        while self.num_bytes + num_bytes > self._limit:
            entry = self._pop_first(self._heap)
            self._evict(entry)
            victims.append(entry.entry_id)
            if self._ageing:
                self.age = max(self.age, entry.rank[0]) + self._ageing * entry.num_bytes / self._limit
        return tuple(victims)

    def _pop_first(self, heap: list[_Rank]) -> _Entry:
        """The entry that goes first of those in a heap."""
        while True:
            rank = heapq.heappop(heap)
            entry = self._entries.get(rank[2])
            if entry is not None and entry.state == "stored" and entry.rank == rank:
                return entry

    def _evict(self, entry: _Entry) -> None:
        self._take_out(entry, "evictions")
        self._counters["evicted_bytes"] += entry.num_bytes

    def _use(self, entry: _Entry) -> None:
        self._clock += 1
        entry.rank = (0.0 if self._ageing is None else self.age + entry.frequency, self._clock, entry.entry_id)
        heapq.heappush(self._heap, entry.rank)
        if self.quota.is_limited:
            heapq.heappush(self._own_heaps.setdefault(entry.partition, []), entry.rank)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        """Without what is no longer current."""
        stored = [e for e in self._entries.values() if e.state == "stored"]
        self._heap = [e.rank for e in stored]
        heapq.heapify(self._heap)
        if self.quota.is_limited:
            self._own_heaps = {}
            for entry in stored:
                self._own_heaps.setdefault(entry.partition, []).append(entry.rank)
            for heap in self._own_heaps.values():
                heapq.heapify(heap)

    def _take_out(self, entry: _Entry, counter: str) -> None:
        """It is found no more."""
        self._counters[counter] += 1
        self._stored_bytes -= entry.num_bytes
        peers = self._by_key[entry.entry_id.key]
        del peers[entry.entry_id]
        if not peers:
            del self._by_key[entry.entry_id.key]
        self._remove(entry)
        if self.observer is not None:
            self.observer.removed(*entry.entry_id)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.entry_id]
        self.num_bytes -= entry.num_bytes
        self.quota.remove(entry.partition, entry.num_bytes)
        if entry.state != "stored":
            self._note_writing(entry.partition, -entry.num_bytes)
