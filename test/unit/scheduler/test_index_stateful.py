"""A state machine: the index against a model of plain lists, over a store that evicts whenever it likes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chunk_cache.index.chunk_index import TOKENS_PER_LOOK, ChunkIndex
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.need import PREPARED_CFO, Need
from chunk_cache.index.system_prompt import marks_of, num_pieces
from chunk_cache.index.variant import Home, NodeHome, PathHome, PathTokens, Variant
from chunk_cache.index.victims import AGEING, EVICTIONS
from chunk_cache.keys import Partition
from unit.scheduler.mirror import Mirror
from unit.scheduler.overlap import adjusted_overlap, order_penalty, prefix_overlap

LENS = (3, 5, 2, 7)
KEYS = tuple(bytes([i]) * 16 for i in range(len(LENS)))
PARTITIONS = tuple(Partition("other") if i == 2 else Partition() for i in range(len(LENS)))
"""Of each chunk."""
CHUNKS = st.integers(0, len(LENS) - 1)
INTER = st.none() | st.lists(st.integers(0, 3), min_size=4, max_size=4)
SYSTEMS = {marks_of(tokens): tokens for tokens in (range(0), range(40), range(100), [*range(70), *range(30)])}
"""System prompts by their marks; they begin alike."""
SHARES = (0.25, 0.125, 0.0625)
"""Of each chunk's attention, on the pieces of its system prompt."""
SYSTEM = st.sampled_from(list(SYSTEMS))


def some_statistics(length: int, inter: list[int], system: bytes) -> ChunkStatistics:
    """Small integers, so that many CFOs are equal."""
    values, cci = np.ones(length, dtype=np.float32), 0.5 + 0.125 * (sum(inter) % 4)
    shares = np.array(SHARES[: num_pieces(system)], dtype=np.float32)
    return ChunkStatistics(values, values, np.array(inter, dtype=np.float32), cci, shares)


@dataclass
class Record:
    """What the model knows of a variant."""

    variant_id: int
    chunk: int
    start: int
    generation: int
    behind: tuple[bytes, tuple[bytes, ...]]
    """Marks of its system prompt, and its context."""
    home: Home
    statistics: ChunkStatistics | None = None
    is_prepared: bool = False
    last_use: int = 0
    num_uses: int = 0
    frequency: float = 0.0
    worth: float = 0.0

    @property
    def context(self) -> tuple[bytes, ...]:
        return self.behind[1]

    def system_charge(self, new: bytes) -> float:
        """What it gave to the pieces of its system prompt that are not in the new one; all where that is not known."""
        own, other = SYSTEMS[self.behind[0]], SYSTEMS[new]
        ends = [1, 64, 128]
        gone = [i for i in range(num_pieces(self.behind[0])) if list(own[: ends[i]]) != list(other[: ends[i]])]
        return sum(SHARES[i] for i in gone) if self.statistics else float(own != other and len(own) > 0)

    def unit_cfo(self, system: bytes, context: list[bytes]) -> float:
        return self.context_cfo(context) + self.system_charge(system)

    def context_cfo(self, context: list[bytes]) -> float:
        """By the paper's equations, one after the other; but what was computed alone costs 1 behind anything."""
        if self.is_prepared:
            return PREPARED_CFO
        if not self.context:
            return float(bool(context))
        if self.statistics is None:
            cci, inter = 1.0, np.zeros(len(self.context))
        else:
            cci, inter = self.statistics.cci, self.statistics.inter
        beta = prefix_overlap(self.context, inter, context)
        return cci * (1.0 - adjusted_overlap(beta, order_penalty(self.context, context)))


@dataclass
class Model:
    """The rules of the index, by scanning lists."""

    max_variants: int
    max_per_chunk: int
    max_path_tokens: int
    eviction: str
    share: float
    age: float = 0.0
    records: list[Record] = field(default_factory=list)
    path_uses: dict[PathTokens, int] = field(default_factory=dict)
    next_id: int = 0
    clock: int = 0
    gone: dict[int, str] = field(default_factory=dict)
    """Chunks that are, and what is said of them."""

    def share_of(self, bound: int) -> float:
        return float("inf") if self.share == 1.0 else max(1, int(self.share * bound))

    def own(self, partition: Partition) -> list[Record]:
        return [r for r in self.records if PARTITIONS[r.chunk] == partition]

    def paths(self, partition: Partition | None = None) -> list[PathTokens]:
        homes = [r.home for r in (self.records if partition is None else self.own(partition))]
        return list({home.path: None for home in homes if isinstance(home, PathHome)})

    def use(self, record: Record) -> None:
        self.clock += 1
        record.last_use = self.clock
        record.worth = self.age + record.frequency
        if isinstance(record.home, PathHome):
            self.path_uses[record.home.path] = self.clock

    def forget_unheld(self) -> None:
        self.path_uses = {path: self.path_uses[path] for path in self.paths() if path in self.path_uses}

    def drop(self, records: list[Record]) -> None:
        self.records = [r for r in self.records if r not in records]
        self.forget_unheld()

    def drop_gone(self, records: list[Record]) -> None:
        """As `drop`, of what the store has evicted."""
        self.drop(records)
        left = {r.chunk for r in self.records}
        self.gone |= {r.chunk: "evicted" for r in records if r.chunk not in left}

    def shed(self, records: list[Record]) -> None:
        """As `drop`, of what goes because its partition has its share."""
        self.drop(records)
        left = {r.chunk for r in self.records}
        self.gone |= {r.chunk: "partition_share" for r in records if r.chunk not in left}

    def order(self, record: Record) -> tuple[float, bool, int]:
        """Of all variants, smallest goes first."""
        if self.eviction == "frequency-reuse":
            return record.worth, record.generation == 0, record.last_use
        return record.generation == 0, record.is_prepared and record.generation > 0, record.last_use

    def evict(self, record: Record) -> None:
        self.age = max(self.age, record.worth)
        self.drop([record])

    def make_path_room(self, num_new: int, partition: Partition) -> None:
        while sum(len(p) for p in self.paths(partition)) + num_new > self.share_of(self.max_path_tokens):
            oldest = min(self.paths(partition), key=lambda p: self.path_uses[p])
            self.shed([r for r in self.records if isinstance(r.home, PathHome) and r.home.path is oldest])
        while sum(len(p) for p in self.paths()) + num_new > self.max_path_tokens:
            oldest = min(self.paths(), key=lambda p: self.path_uses[p])
            self.drop([r for r in self.records if isinstance(r.home, PathHome) and r.home.path is oldest])

    def add(
        self,
        chunk: int,
        start: int,
        generation: int,
        behind: tuple[bytes, tuple[bytes, ...]],
        home: Home,
        statistics: ChunkStatistics | None,
        is_prepared: bool = False,
    ) -> int | None:
        partition = PARTITIONS[chunk]
        most = min(self.max_path_tokens, self.share_of(self.max_path_tokens))
        if isinstance(home, PathHome) and len(home.path) > most:
            return None
        peers = [r for r in self.records if r.chunk == chunk]
        others = [r for r in peers if not r.is_prepared]
        if generation and not is_prepared and any(r.generation == 0 and r.behind == behind for r in others):
            return None
        same = [r for r in peers if (r.start, r.behind, r.is_prepared) == (start, behind, is_prepared)]
        if same and same[0].generation < generation and not is_prepared:
            return None
        if same and same[0].generation == generation:
            same[0].home = home
            same[0].statistics = statistics or same[0].statistics
            self.use(same[0])
            self.make_path_room(0, partition)
            self.forget_unheld()
            return same[0].variant_id
        rank = generation, not is_prepared
        replaced = [r for r in peers if is_prepared and r.is_prepared and r.behind[0] == behind[0]] or same
        no_worse = [r for r in peers if (r.generation, not r.is_prepared) >= rank]
        if not replaced and len(peers) >= self.max_per_chunk and not no_worse:
            return None
        worse = [r for r in others if r.generation and r.behind == behind]
        self.drop(worse if generation == 0 and not is_prepared else replaced)
        peers = [r for r in self.records if r.chunk == chunk]
        if len(peers) >= self.max_per_chunk:
            if self.eviction == "lru":
                self.evict(min(peers, key=lambda r: (-r.generation, r.is_prepared, r.last_use)))
            else:
                self.evict(min((r for r in peers if r in no_worse), key=self.order))
        if isinstance(home, PathHome) and home.path not in self.paths():
            self.make_path_room(len(home.path), partition)
        while len(self.own(partition)) + 1 > self.share_of(self.max_variants):
            self.shed([min(self.own(partition), key=self.order)])
        while len(self.records) >= self.max_variants:
            self.evict(min(self.records, key=self.order))
        record = Record(self.next_id, chunk, start, generation, behind, home, statistics, is_prepared)
        self.next_id += 1
        self.gone.pop(chunk, None)
        self.records.append(record)
        self.use(record)
        return record.variant_id


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        max_variants=st.integers(1, 8),
        max_per_chunk=st.integers(1, 3),
        max_path_tokens=st.sampled_from((12, 30, 200)),
        eviction=st.sampled_from(EVICTIONS),
        share=st.sampled_from((1.0, 0.75, 0.5, 0.25)),
    )
    def start(
        self,
        max_variants: int,
        max_per_chunk: int,
        max_path_tokens: int,
        eviction: str,
        share: float,
    ) -> None:
        self.index = ChunkIndex(
            max_variants,
            max_per_chunk,
            max_path_tokens,
            eviction,
            partition_share=share,
        )
        self.index.observer = self.mirror = Mirror()
        self.model = Model(max_variants, max_per_chunk, max_path_tokens, eviction, share)
        self.stored: dict[PathTokens | NodeHome, int] = {}  # home -> leading tokens that are still in the store

    def resolve(self, variant: Variant | Record) -> int:
        home = variant.home
        length = variant.length if isinstance(variant, Variant) else LENS[variant.chunk]
        left = self.stored[home.path] - home.start if isinstance(home, PathHome) else self.stored[home]
        return max(0, min(length, left))

    def add(
        self,
        chunk: int,
        start: int,
        generation: int,
        context: tuple[bytes, ...],
        home: Home,
        inter: list[int] | None = None,
        system: bytes = b"",
        is_prepared: bool = False,
    ) -> bool:
        statistics = None if inter is None else some_statistics(LENS[chunk], inter[: len(context)], system)
        wanted = self.index.wants(
            KEYS[chunk], start=start, generation=generation, context=context, system=system, is_prepared=is_prepared
        )
        variant = self.index.add(
            KEYS[chunk],
            length=LENS[chunk],
            start=start,
            generation=generation,
            context=context,
            home=home,
            system=system,
            statistics=statistics,
            is_prepared=is_prepared,
        )
        expected = self.model.add(chunk, start, generation, (system, context), home, statistics, is_prepared)
        assert (variant.variant_id if variant else None) == expected
        fits = not isinstance(home, PathHome) or self.index.takes_path(len(home.path))
        assert (variant is not None) == (wanted and fits)
        assert variant is None or variant.home == home
        return variant is not None

    @rule(
        chunks=st.lists(CHUNKS, min_size=1, max_size=4),
        system_len=st.integers(0, 2),
        tail_len=st.integers(0, 3),
        inter=INTER,
        system=SYSTEM,
    )
    def remember_exact_prompt(
        self, chunks: list[int], system_len: int, tail_len: int, inter: list[int] | None, system: bytes
    ) -> None:
        chunks = [chunk for chunk in chunks if PARTITIONS[chunk] == PARTITIONS[chunks[0]]]
        total = system_len + sum(LENS[c] for c in chunks) + tail_len
        path = PathTokens(array("q", range(total)), PARTITIONS[chunks[0]])
        self.stored[path] = total
        start, context = system_len, ()
        for chunk in chunks:
            self.add(chunk, start, 0, context, PathHome(path, start), inter, system)
            start, context = start + LENS[chunk], (*context, KEYS[chunk])

    @rule(
        chunk=CHUNKS,
        start=st.integers(0, 4),
        generation=st.integers(0, 3),
        context=st.lists(CHUNKS, max_size=2),
        padding=st.integers(0, 2),
        inter=INTER,
        system=SYSTEM,
    )
    def remember_node(
        self,
        chunk: int,
        start: int,
        generation: int,
        context: list[int],
        padding: int,
        inter: list[int] | None,
        system: bytes,
    ) -> None:
        home = NodeHome(array("q", range(LENS[chunk] + padding)), "chunk", partition=PARTITIONS[chunk])
        self.stored[home] = LENS[chunk]
        self.add(chunk, start, generation, tuple(KEYS[c] for c in context), home, inter, system)

    @rule(
        chunk=CHUNKS,
        start=st.integers(0, 4),
        generation=st.integers(0, 1),
        neighbours=st.lists(CHUNKS, min_size=1, max_size=2),
        inter=INTER,
        system=SYSTEM,
    )
    def prepare(
        self, chunk: int, start: int, generation: int, neighbours: list[int], inter: list[int] | None, system: bytes
    ) -> None:
        home = NodeHome(array("q", range(LENS[chunk])), "chunk", partition=PARTITIONS[chunk])
        self.stored[home] = LENS[chunk]
        context = tuple(KEYS[c] for c in neighbours)
        self.add(chunk, start, generation, context, home, inter, system, is_prepared=True)

    @rule(data=st.data())
    def store_evicts(self, data: st.DataObject) -> None:
        if self.stored:
            home = data.draw(st.sampled_from(list(self.stored)))
            self.stored[home] = data.draw(st.integers(0, self.stored[home]))

    @rule(
        chunk=CHUNKS,
        max_generation=st.integers(0, 4),
        use=st.none() | st.sampled_from((0.25, 1.0, 4.0)),
        context=st.none() | st.lists(CHUNKS, max_size=4),
        system=SYSTEM,
        is_system_fixed=st.booleans(),
    )
    def look_up(
        self,
        chunk: int,
        max_generation: int,
        use: float | None,
        context: list[int] | None,
        system: bytes,
        is_system_fixed: bool,
    ) -> None:
        new = None if context is None else [KEYS[c] for c in context]
        peers = [r for r in self.model.records if r.chunk == chunk]
        # Rounded, because the order of a sum may decide the last bit and with it a tie.
        cfo = {r.variant_id: 0.0 if new is None else round(r.unit_cfo(system, new), 9) for r in peers}
        peers.sort(key=lambda r: (cfo[r.variant_id], r.generation, -r.last_use))
        allowed = [r for r in peers if new is None or r.generation <= max_generation]
        reason = "generation_limit" if len(allowed) < len(peers) else None
        if new is not None and is_system_fixed and any(r.behind[0] != system for r in allowed):
            allowed, reason = [r for r in allowed if r.behind[0] == system], "other_system"
        is_known = bool(peers)
        was_gone = self.model.gone.get(chunk, "not_stored")
        prepared = [r for r in allowed if r.is_prepared]
        gone = [r for r in prepared if not self.resolve(r)]
        allowed = [r for r in allowed if r not in gone]
        self.model.drop_gone(gone)
        if len(prepared) > len(gone):
            allowed = [r for r in allowed if r.is_prepared or r.generation == 0]
        covered = [self.resolve(r) for r in allowed]
        need = None if new is None else Need(max_generation, tuple(new), system, is_system_fixed)
        found = self.index.lookup(KEYS[chunk], self.resolve, need)

        shares = [1.0 - (1.0 - cfo[r.variant_id]) * c / LENS[chunk] for r, c in zip(allowed, covered, strict=True)]
        stored = [i for i in range(len(allowed)) if covered[i]]
        # It stops where nothing better can come, and has then forgotten what it found gone until there.
        num_seen = 0
        while num_seen < len(allowed) and not any(
            shares[i] <= cfo[allowed[num_seen].variant_id] for i in stored if i < num_seen
        ):
            num_seen += 1
        self.model.drop_gone([r for r in allowed[:num_seen] if self.resolve(r) == 0])
        if not any(covered):
            if not is_known:
                reason = was_gone
            elif reason is None:
                reason = self.model.gone.get(chunk, "evicted")
            assert (found.variant, found.covered_len, found.reason) == (None, 0, reason)
            return
        at = min(stored, key=lambda i: (shares[i], i))
        best = allowed[at]
        assert found.variant is not None
        assert (found.variant.variant_id, found.covered_len, found.reason) == (best.variant_id, covered[at], None)
        assert found.unit_cfo == (None if new is None else pytest.approx(cfo[best.variant_id]))
        is_same = new is None or best.behind[0] == system
        assert found.other_system == (None if is_same else pytest.approx(best.system_charge(system)))
        if use is not None:
            assert self.index.touch(found.variant, use)
            best.num_uses += 1
            best.frequency += use
            self.model.use(best)

    @rule(count=st.integers(0, 10))
    def sweep(self, count: int) -> None:
        gone = {r.variant_id for r in self.model.records if self.resolve(r) == 0}
        num_gone = self.index.sweep(self.resolve, count * TOKENS_PER_LOOK)
        left = {variant.variant_id for variant in self.index}
        swept = [r for r in self.model.records if r.variant_id not in left]
        assert {r.variant_id for r in swept} <= gone
        assert len(swept) == num_gone <= 1 + count
        self.model.drop_gone(swept)

    @rule()
    def sweep_all(self) -> None:
        gone = [r for r in self.model.records if self.resolve(r) == 0]
        assert self.index.sweep(self.resolve, 1000 * TOKENS_PER_LOOK) == len(gone)
        self.model.drop_gone(gone)

    @rule(turnovers=st.sampled_from((0.25, 1.0)))
    def store_turns_over(self, turnovers: float) -> None:
        self.index.advance_age(turnovers)
        if self.model.eviction == "frequency-reuse":
            self.model.age += AGEING * turnovers
        assert self.index.age == (0.0 if self.model.eviction == "lru" else self.model.age)

    @rule(variant_id=st.integers(0, 20))
    def discard(self, variant_id: int) -> None:
        known = [r for r in self.model.records if r.variant_id == variant_id]
        assert self.index.discard(variant_id) == bool(known)
        self.model.drop(known)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.drop(self.model.records)
        self.model.gone.clear()

    @invariant()
    def index_equals_model(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity(self.resolve)
        records = sorted(self.model.records, key=self.model.order)
        assert [
            (v.variant_id, v.key, v.start, v.generation, (v.system, v.context), v.home, v.last_use, v.reuse_frequency)
            for v in self.index
        ] == [
            (r.variant_id, KEYS[r.chunk], r.start, r.generation, r.behind, r.home, r.last_use, r.frequency)
            for r in records
        ]
        assert [v.num_uses for v in self.index] == [r.num_uses for r in records]
        for chunk, key in enumerate(KEYS):
            of_chunk = sorted(r.variant_id for r in records if r.chunk == chunk)
            assert [v.variant_id for v in self.index.variants_of(key)] == of_chunk
        assert self.index.num_chunks == len({r.chunk for r in records})
        assert self.mirror.held == {(v.key, v.name): (v.holder.partition.key, v.length) for v in self.index}, (
            "its observer was told something else"
        )
        assert self.index.num_path_tokens == sum(len(p) for p in self.model.paths())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
