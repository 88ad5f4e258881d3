"""What one bounded tier (host memory, a disk, a remote store) keeps, decided with ids and byte counts.

    prepare_store    makes room for an entry and names the victims; it is counted from now on, but not found
    complete_store   ends a write; if it succeeded, the entry is found from now on
    note_read        ends a read; a corrupt entry is found no more
    touch            counts a use; a read alone is no use
    discard, clear   forget; an entry that is being written leaves when its write is over

The ledger decides, workers copy. Victims are gone at once, all that are needed or none. Nothing depends on a wall clock
or the order of a set: equal calls give equal results on every rank. A call is O(log entries), amortised over what it
evicts. A partition that has its share makes room for a new entry by evicting its own.

The eviction orders are those of `index.victims` (lru; least aged reuse frequency, Cache-Craft section 3.3), except that
exact and derived entries are treated alike. The heap here holds keys, not variants, and only entries that may go.

A store may hold tens of millions of chunks, so what is kept in memory of them is packed: the entries of a chunk are one
string of bytes, which the garbage collector skips. A tier without a bound has no heap. All else of a variant (tokens,
context, statistics) is read from the tier when it is needed.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from chunk_cache.index.observer import Observer
from chunk_cache.index.quota import Shares
from chunk_cache.index.variant import Rank, rank_of
from chunk_cache.index.victims import AGEING, EVICTIONS
from chunk_cache.keys import DEFAULT_PARTITION

REFUSALS = ("stored", "writing", "leaving", "too_big", "protected", "partition_share")
"""In this order: it is there; is being written; was discarded while it is written; is too big for the tier; has no room
beside entries that are being written; is too big for the share of its partition, beside entries being written."""
COUNTERS = (
    *("hits", "misses", "stores", "failed_stores", "evictions", "share_evictions", "evicted_bytes", "discards"),
    "corrupt",
)
"""`note_read` counts hits and misses; stores are writes after which an entry is found; evictions and discards count
found entries. Share evictions, for the share of a partition, are among the evictions."""


class EntryId(NamedTuple):
    """One variant of a chunk in a tier."""

    key: bytes
    """`chunk_key` of the chunk."""
    name: str
    """`variant_name`, which tells the variants of one chunk apart."""

    def __str__(self) -> str:
        return f"{self.key.hex()}-{self.name}"


class Traits(NamedTuple):
    """What is kept in memory of a variant beside its id."""

    generation: int = 0
    is_prepared: bool = False
    context: bytes = bytes(8)
    """`context_digest`."""

    @property
    def rank(self) -> Rank:
        """Rank of the variant; see `rank_of`."""
        return rank_of(self.generation, self.is_prepared)


PLAIN = Traits()
"""Exact, and behind nothing."""


def context_digest(context: tuple[bytes, ...]) -> bytes:
    """8 bytes that stand for the chunks in front of a variant."""
    return hashlib.blake2b(b"".join(context), digest_size=8).digest() if context else bytes(8)


_Place: TypeAlias = tuple[float, int, bytes]
"""Worth (0 with lru), last use (of no other entry), key; the smallest goes first."""


class _Entry(NamedTuple):
    name: bytes
    context: bytes
    partition: bytes
    num_bytes: int
    frequency: float
    worth: float
    last_use: int
    generation: int
    is_prepared: bool
    state: bytes = b"w"

    def id_of(self, key: bytes) -> EntryId:
        return EntryId(key, self.name.hex())

    def place(self, key: bytes) -> _Place:
        return self.worth, self.last_use, key

    @property
    def traits(self) -> Traits:
        return Traits(self.generation, self.is_prepared, self.context)

    @property
    def is_stored(self) -> bool:
        return self.state == b"s"


_PACKED = struct.Struct("<8s8s16sqddqq?c")
_STATES = {b"w": "writing", b"s": "stored", b"l": "leaving"}
"""Leaving: discarded while it is written."""


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
        self._packed: dict[bytes, bytes] = {}  # by key, its entries; those found in the order of their stores
        self._stored_bytes = 0
        self._heap: list[_Place] = []  # of found entries, and some stale ones; only with a bound
        self._own_heaps: dict[bytes, list[_Place]] = {}  # the same of each partition, only with a quota
        self._num_own_places = 0  # pushed to them since they were made
        self._writing_bytes: dict[bytes, int] = {}  # of each partition, bytes of entries not found yet
        self._clock = 0
        self.observer: Observer | None = None
        """Told which entries are found from now on, and which no more; sizes are bytes."""

    def __len__(self) -> int:
        """Number of entries that are found."""
        return self._counters["stores"] - self._counters["evictions"] - self._counters["discards"]

    def __iter__(self) -> Iterator[EntryId]:
        """The entries that are found, in eviction order."""
        stored = ((entry.place(key), entry) for key, entry in self._all() if entry.is_stored)
        yield from (entry.id_of(place[2]) for place, entry in sorted(stored))

    def keys(self) -> list[bytes]:
        """Keys of the chunks that have an entry: found, being written or leaving."""
        return list(self._packed)

    def stats(self) -> dict[str, int]:
        """A copy of the counters, which only grow: `COUNTERS`, and "refused_" with each of `REFUSALS`."""
        return dict(self._counters)

    def contains(self, entry_id: EntryId) -> bool:
        entry = self._get(entry_id)
        return entry is not None and entry.is_stored

    def knows(self, entry_id: EntryId) -> bool:
        """Whether it is found, or will be."""
        entry = self._get(entry_id)
        return entry is not None and entry.state != b"l"

    def entries_of(self, key: bytes) -> tuple[EntryId, ...]:
        """The variants of a chunk that are found, in the order in which they were stored."""
        return tuple(entry.id_of(key) for entry in self._of(key) if entry.is_stored)

    def peers_of(self, key: bytes) -> dict[EntryId, Traits]:
        """The variants of a chunk that are found, in eviction order."""
        found = sorted((entry for entry in self._of(key) if entry.is_stored), key=lambda entry: entry.place(key))
        return {entry.id_of(key): entry.traits for entry in found}

    def num_bytes_of(self, entry_id: EntryId) -> int:
        """Bytes of an entry that is found."""
        return self._found(entry_id).num_bytes

    def frequency_of(self, entry_id: EntryId) -> float:
        """Reuse frequency f_r of an entry that is found."""
        return self._found(entry_id).frequency

    def prepare_store(
        self,
        entry_id: EntryId,
        num_bytes: int,
        frequency: float = 0.0,
        partition: bytes = DEFAULT_PARTITION,
        traits: Traits = PLAIN,
    ) -> tuple[EntryId, ...] | None:
        """Makes room for an entry; returns the victims in order; None = refused (`REFUSALS`, see `refusal`).

        Args:
            frequency: f_r that it comes with.
            partition: the `Partition.key` of its chunk.
        """
        assert num_bytes > 0, f"{entry_id} has {num_bytes} bytes"
        refusal = self.refusal(entry_id, num_bytes, partition)
        if refusal is not None:
            self._counters[f"refused_{refusal}"] += 1
            return None
        victims = self._make_room(num_bytes, partition)
        name = bytes.fromhex(entry_id.name)
        assert (len(name), len(partition)) == (8, 16), f"{entry_id} of partition {partition.hex()}"
        generation, is_prepared, context = traits
        entry = _Entry(name, context, partition, num_bytes, frequency, 0.0, 0, generation, is_prepared)
        self._pack(entry_id.key, [*self._of(entry_id.key), entry])
        self.num_bytes += num_bytes
        self.quota.add(partition, num_bytes)
        self._note_writing(partition, num_bytes)
        return victims

    def complete_store(self, entry_id: EntryId, ok: bool) -> bool:
        """Ends a write; returns whether the entry is found from now on. One that was discarded meanwhile is not."""
        entry = self._get(entry_id)
        assert entry is not None, f"{entry_id} is not being written"
        assert not entry.is_stored, f"{entry} is not being written"
        if not ok or entry.state == b"l":
            self._counters["failed_stores"] += 1
            self._remove(entry_id.key, entry)
            return False
        self._counters["stores"] += 1
        self._note_writing(entry.partition, -entry.num_bytes)
        self._stored_bytes += entry.num_bytes
        others = [other for other in self._of(entry_id.key) if other.name != entry.name]
        self._pack(entry_id.key, [*others, entry])
        self._use(entry_id.key, entry._replace(state=b"s"))
        if self.observer is not None:
            self.observer.stored(*entry_id, entry.partition, entry.num_bytes)
        return True

    def note_read(self, entry_id: EntryId, *, is_corrupt: bool) -> None:
        """Ends a read: a hit if the entry is found here, else a miss. A corrupt entry is found no more."""
        is_hit = self.contains(entry_id)
        self._counters["hits" if is_hit else "misses"] += 1
        if is_hit and is_corrupt:
            self._counters["corrupt"] += 1
            self.discard(entry_id)

    def touch(self, entry_id: EntryId, weight: float = 1.0) -> bool:
        """Counts a use of an entry; False if it is not found.

        Args:
            weight: what it adds to f_r (`reusability.use_weight`).
        """
        entry = self._get(entry_id)
        if entry is None or not entry.is_stored:
            return False
        self._use(entry_id.key, entry._replace(frequency=entry.frequency + weight))
        return True

    def note_frequency(self, entry_id: EntryId, frequency: float) -> None:
        """Notes that a found entry was used elsewhere, so that its f_r is at least `frequency`."""
        entry = self._found(entry_id)
        self._use(entry_id.key, entry._replace(frequency=max(entry.frequency, frequency)))

    def discard(self, entry_id: EntryId) -> bool:
        """Forgets an entry; False if it was not there, or is leaving already."""
        entry = self._get(entry_id)
        if entry is None or entry.state == b"l":
            return False
        if entry.is_stored:
            self._take_out(entry_id.key, entry, "discards")
        else:
            self._replace(entry_id.key, entry._replace(state=b"l"))
        return True

    def clear(self) -> None:
        """Discard everything."""
        observer, self.observer = self.observer, None
        for key, entry in list(self._all()):
            self.discard(entry.id_of(key))
        if observer is not None:
            self.observer = observer
            observer.cleared()

    def check_integrity(self) -> None:
        """Raises an `AssertionError` where the parts contradict each other."""
        entries = [(entry.id_of(key), entry) for key, entry in self._all()]
        stored = [(entry_id, entry) for entry_id, entry in entries if entry.is_stored]
        assert self.num_bytes == sum(e.num_bytes for _, e in entries) <= self._limit, f"{self.num_bytes} bytes"
        assert self._stored_bytes == sum(e.num_bytes for _, e in stored), f"{self._stored_bytes} bytes are found"
        places = {entry.place(entry_id.key) for entry_id, entry in stored}
        assert places <= set(self._heap) or self.max_bytes is None, "what may go is not in the heap"
        held, writing = Counter[bytes](), Counter[bytes]()
        for entry_id, entry in entries:
            held[entry.partition] += entry.num_bytes
            writing[entry.partition] += entry.num_bytes * (not entry.is_stored)
            if self.quota.is_limited and entry.is_stored:
                own = self._own_heaps[entry.partition]
                assert entry.place(entry_id.key) in own, f"{entry} is not in the heap of its partition"
        self.quota.check_integrity(held)
        assert not self.quota.above, f"partitions above their share: {self.quota.above}"
        assert self._writing_bytes == {p: n for p, n in writing.items() if n}, f"{self._writing_bytes} are written"
        assert len({entry_id for entry_id, _ in entries}) == len(entries), "an entry is there twice"
        assert all(self._packed.values()), "a chunk has no entry"
        assert len(self) == len(stored), f"{len(self)} are counted as found"
        for _, entry in stored:
            assert 0 < entry.last_use <= self._clock, f"{entry} is out of order"
            assert entry.worth <= (self._ageing is not None) * (self.age + entry.frequency), f"{entry} is worth more"

    def refusal(self, entry_id: EntryId, num_bytes: int, partition: bytes = DEFAULT_PARTITION) -> str | None:
        """Why an entry would not be taken now; None = it would be."""
        entry = self._get(entry_id)
        if entry is not None:
            return _STATES[entry.state]
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
        """Evicts what the partition has above its share first, which does not age the entries of others."""
        victims = []
        while self.quota.excess(partition, num_bytes) > 0:
            key, entry = self._pop_first(self._own_heaps[partition])
            self._evict(key, entry)
            self._counters["share_evictions"] += 1
            victims.append(entry.id_of(key))
        while self.num_bytes + num_bytes > self._limit:
            key, entry = self._pop_first(self._heap)
            self._evict(key, entry)
            victims.append(entry.id_of(key))
            if self._ageing:
                self.age = max(self.age, entry.worth) + self._ageing * entry.num_bytes / self._limit
        return tuple(victims)

    def _pop_first(self, heap: list[_Place]) -> tuple[bytes, _Entry]:
        """Takes the first victim out of a heap; returns it with its key."""
        while True:
            _, last_use, key = heapq.heappop(heap)
            for entry in self._of(key):
                if entry.is_stored and entry.last_use == last_use:
                    return key, entry

    def _evict(self, key: bytes, entry: _Entry) -> None:
        self._take_out(key, entry, "evictions")
        self._counters["evicted_bytes"] += entry.num_bytes

    def _use(self, key: bytes, entry: _Entry) -> None:
        self._clock += 1
        worth = 0.0 if self._ageing is None else self.age + entry.frequency
        used = entry._replace(worth=worth, last_use=self._clock)
        self._replace(key, used)
        if self.max_bytes is None:
            return  # nothing ever goes
        heapq.heappush(self._heap, used.place(key))
        if self.quota.is_limited:
            heapq.heappush(self._own_heaps.setdefault(entry.partition, []), used.place(key))
            self._num_own_places += 1
        if max(len(self._heap), self._num_own_places) > 2 * len(self) + 64:
            self._rebuild_heaps()

    def _rebuild_heaps(self) -> None:
        """Makes the heaps anew, without stale entries."""
        stored = [(entry.partition, entry.place(key)) for key, entry in self._all() if entry.is_stored]
        self._heap = [place for _, place in stored]
        heapq.heapify(self._heap)
        if self.quota.is_limited:
            self._own_heaps = {}
            for partition, place in stored:
                self._own_heaps.setdefault(partition, []).append(place)
            self._num_own_places = len(stored)
            for heap in self._own_heaps.values():
                heapq.heapify(heap)

    def _take_out(self, key: bytes, entry: _Entry, counter: str) -> None:
        """Removes an entry that was found."""
        self._counters[counter] += 1
        self._stored_bytes -= entry.num_bytes
        self._remove(key, entry)
        if self.observer is not None:
            self.observer.removed(*entry.id_of(key))

    def _remove(self, key: bytes, entry: _Entry) -> None:
        self._pack(key, [other for other in self._of(key) if other.name != entry.name])
        self.num_bytes -= entry.num_bytes
        self.quota.remove(entry.partition, entry.num_bytes)
        if not entry.is_stored:
            self._note_writing(entry.partition, -entry.num_bytes)

    # The packed entries.

    def _of(self, key: bytes) -> list[_Entry]:
        return [_Entry._make(fields) for fields in _PACKED.iter_unpack(self._packed.get(key, b""))]

    def _all(self) -> Iterator[tuple[bytes, _Entry]]:
        for key in self._packed:
            yield from ((key, entry) for entry in self._of(key))

    def _get(self, entry_id: EntryId) -> _Entry | None:
        name = bytes.fromhex(entry_id.name)
        return next((entry for entry in self._of(entry_id.key) if entry.name == name), None)

    def _found(self, entry_id: EntryId) -> _Entry:
        entry = self._get(entry_id)
        assert entry is not None, f"{entry_id} is not there"
        return entry

    def _replace(self, key: bytes, entry: _Entry) -> None:
        """Replaces the entry of the same name."""
        self._pack(key, [entry if other.name == entry.name else other for other in self._of(key)])

    def _pack(self, key: bytes, entries: list[_Entry]) -> None:
        if entries:
            self._packed[key] = b"".join(_PACKED.pack(*entry) for entry in entries)
        else:
            del self._packed[key]
