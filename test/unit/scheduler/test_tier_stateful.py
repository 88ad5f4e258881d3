"""A state machine: the ledger of a tier against a model that scans a list."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunk_cache.index.victims import EVICTIONS
from chunk_cache.tiers.tier_ledger import COUNTERS, REFUSALS, EntryId, TierLedger
from unit.scheduler.mirror import Mirror

IDS = tuple(EntryId(key, name) for key in (b"a", b"b", b"c") for name in ("0" * 16, "1" * 16))
ENTRIES = st.sampled_from(IDS)
PARTITIONS = {b"a": b"one".ljust(16), b"b": b"other".ljust(16), b"c": b"one".ljust(16)}


@dataclass
class Record:
    entry_id: EntryId
    num_bytes: int
    frequency: float = 0.0
    state: str = "writing"
    worth: float = 0.0
    last_use: int = 0
    stored_at: int = 0

    @property
    def partition(self) -> bytes:
        return PARTITIONS[self.entry_id.key]


@dataclass
class Model:
    max_bytes: int | None
    eviction: str
    ageing: float
    share: float
    age: float = 0.0
    clock: int = 0
    records: list[Record] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))

    def get(self, entry_id: EntryId) -> Record | None:
        return next((r for r in self.records if r.entry_id == entry_id), None)

    def found(self, entry_id: EntryId) -> Record | None:
        record = self.get(entry_id)
        return record if record is not None and record.state == "stored" else None

    def num_bytes(self) -> int:
        return sum(r.num_bytes for r in self.records)

    def in_order(self) -> list[Record]:
        return sorted((r for r in self.records if r.state == "stored"), key=lambda r: (r.worth, r.last_use))

    def use(self, record: Record) -> None:
        self.clock += 1
        record.last_use = self.clock
        record.worth = self.age + record.frequency if self.eviction == "frequency-reuse" else 0.0

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1

    def prepare_store(self, entry_id: EntryId, num_bytes: int) -> tuple[EntryId, ...] | None:
        there = self.get(entry_id)
        if there is not None:
            return self.refuse(there.state)
        victims: list[Record] = []
        gone: list[Record] = []
        if self.max_bytes is not None:
            if num_bytes > self.max_bytes:
                return self.refuse("too_big")
            partition, may_go = PARTITIONS[entry_id.key], self.in_order()
            most = max(1, int(self.share * self.max_bytes)) if self.share < 1.0 else self.max_bytes
            own = [r for r in self.records if r.partition == partition]
            for_share: list[Record] = []
            while sum(r.num_bytes for r in own if r not in for_share) + num_bytes > most and self.share < 1.0:
                left = [r for r in may_go if r.partition == partition and r not in for_share]
                if not left:
                    return self.refuse("partition_share")
                for_share.append(left[0])
            may_go = [r for r in may_go if r not in for_share]
            gone = [*for_share]
            while self.num_bytes() - sum(r.num_bytes for r in gone) + num_bytes > self.max_bytes:
                if not may_go:
                    return self.refuse("protected")
                victims.append(may_go.pop(0))
                gone = [*for_share, *victims]
            for victim in for_share:
                self.records.remove(victim)
                self.counts["evictions"] += 1
                self.counts["share_evictions"] += 1
                self.counts["evicted_bytes"] += victim.num_bytes
        for victim in victims:
            self.records.remove(victim)
            self.counts["evictions"] += 1
            self.counts["evicted_bytes"] += victim.num_bytes
            if self.eviction == "frequency-reuse" and self.ageing:
                self.age = max(self.age, victim.worth) + self.ageing * victim.num_bytes / self.max_bytes
        self.records.append(Record(entry_id, num_bytes))
        return tuple(v.entry_id for v in gone)

    def discard(self, entry_id: EntryId) -> bool:
        record = self.get(entry_id)
        if record is None or record.state == "leaving":
            return False
        if record.state == "stored":
            self.counts["discards"] += 1
            self.records.remove(record)
        record.state = "leaving"
        return True


class TierMachine(RuleBasedStateMachine):
    @initialize(
        max_bytes=st.none() | st.integers(0, 12),
        eviction=st.sampled_from(EVICTIONS),
        ageing=st.sampled_from((0.0, 4.0)),
        share=st.sampled_from((1.0, 0.6, 0.4)),
    )
    def start(self, max_bytes: int | None, eviction: str, ageing: float, share: float) -> None:
        self.tier = TierLedger(max_bytes, eviction, ageing, share)
        self.again = TierLedger(max_bytes, eviction, ageing, share)  # another rank: the same calls
        self.tier.observer = self.mirror = Mirror()
        self.model = Model(max_bytes, eviction, ageing, share)

    def call(self, name: str, *args: object, **options: object) -> object:
        result = getattr(self.tier, name)(*args, **options)
        assert getattr(self.again, name)(*args, **options) == result
        return result

    @rule(entry_id=ENTRIES, num_bytes=st.integers(1, 6))
    def prepare_store(self, entry_id: EntryId, num_bytes: int) -> None:
        assert self.call(
            "prepare_store", entry_id, num_bytes, partition=PARTITIONS[entry_id.key]
        ) == self.model.prepare_store(entry_id, num_bytes)

    @precondition(lambda self: any(r.state != "stored" for r in self.model.records))
    @rule(data=st.data(), ok=st.sampled_from((True, True, True, False)))
    def complete_store(self, data: st.DataObject, ok: bool) -> None:
        record = data.draw(st.sampled_from([r for r in self.model.records if r.state != "stored"]))
        found = ok and record.state == "writing"
        assert self.call("complete_store", record.entry_id, ok) == found
        self.model.counts["stores" if found else "failed_stores"] += 1
        if found:
            record.state = "stored"
            self.model.use(record)
            record.stored_at = self.model.clock
        else:
            self.model.records.remove(record)

    @rule(entry_id=ENTRIES, num_bytes=st.integers(1, 4))
    def store(self, entry_id: EntryId, num_bytes: int) -> None:
        """Both steps, so that tiers fill up."""
        self.prepare_store(entry_id, num_bytes)
        record = self.model.get(entry_id)
        if record is not None and record.state == "writing":
            assert self.call("complete_store", entry_id, True)
            self.model.counts["stores"] += 1
            record.state = "stored"
            self.model.use(record)
            record.stored_at = self.model.clock

    @rule(entry_id=ENTRIES, is_corrupt=st.sampled_from((True, False, False)))
    def note_read(self, entry_id: EntryId, is_corrupt: bool) -> None:
        record = self.model.found(entry_id)
        self.call("note_read", entry_id, is_corrupt=is_corrupt)
        self.model.counts["hits" if record else "misses"] += 1
        if record is not None and is_corrupt:
            self.model.counts["corrupt"] += 1
            self.model.discard(entry_id)

    @rule(entry_id=ENTRIES)
    def touch(self, entry_id: EntryId) -> None:
        record = self.model.found(entry_id)
        assert self.call("touch", entry_id) == (record is not None)
        if record is not None:
            record.frequency += 1.0
            self.model.use(record)

    @rule(entry_id=ENTRIES)
    def discard(self, entry_id: EntryId) -> None:
        assert self.call("discard", entry_id) == self.model.discard(entry_id)

    @rule()
    def clear(self) -> None:
        self.call("clear")
        for entry_id in IDS:
            self.model.discard(entry_id)

    @invariant()
    def tier_equals_model(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        stored = self.model.in_order()
        assert list(self.tier) == list(self.again) == [r.entry_id for r in stored]
        assert (len(self.tier), self.tier.num_bytes) == (len(stored), self.model.num_bytes())
        assert self.mirror.held == {tuple(r.entry_id): (r.partition, r.num_bytes) for r in stored}
        assert self.tier.age == pytest.approx(self.model.age)
        assert self.tier.stats() == self.model.counts | {f"refused_{k}": n for k, n in self.model.refused.items()}
        for entry_id in IDS:
            assert self.tier.contains(entry_id) == (self.model.found(entry_id) is not None)
        for key in (b"a", b"b", b"c", b"d"):
            of_key = [r for r in stored if r.entry_id.key == key]
            of_key.sort(key=lambda r: r.stored_at)
            assert self.tier.entries_of(key) == tuple(r.entry_id for r in of_key)


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
