"""A state machine: the index against a model of plain lists, over a store that evicts whenever it likes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chunk_cache.index import ChunkIndex
from chunk_cache.keys import Partition
from chunk_cache.variant import Home, NodeHome, PathHome, PathTokens, Variant

LENS = (3, 5, 2, 7)
KEYS = tuple(bytes([i]) * 16 for i in range(len(LENS)))
CHUNKS = st.integers(0, len(LENS) - 1)


@dataclass
class Record:
    """What the model knows of a variant."""

    variant_id: int
    chunk: int
    start: int
    generation: int
    context: tuple[bytes, ...]
    home: Home
    last_use: int = 0
    num_uses: int = 0


@dataclass
class Model:
    """The rules of the index, by scanning lists."""

    max_variants: int
    max_per_chunk: int
    max_path_tokens: int
    records: list[Record] = field(default_factory=list)
    path_uses: dict[PathTokens, int] = field(default_factory=dict)
    next_id: int = 0
    clock: int = 0

    def paths(self) -> list[PathTokens]:
        return list({r.home.path: None for r in self.records if isinstance(r.home, PathHome)})

    def use(self, record: Record) -> None:
        self.clock += 1
        record.last_use = self.clock
        if isinstance(record.home, PathHome):
            self.path_uses[record.home.path] = self.clock

    def forget_unheld(self) -> None:
        self.path_uses = {path: self.path_uses[path] for path in self.paths() if path in self.path_uses}

    def drop(self, records: list[Record]) -> None:
        self.records = [r for r in self.records if r not in records]
        self.forget_unheld()

    def make_path_room(self, num_new: int) -> None:
        while sum(len(p) for p in self.paths()) + num_new > self.max_path_tokens:
            oldest = min(self.paths(), key=lambda p: self.path_uses[p])
            self.drop([r for r in self.records if isinstance(r.home, PathHome) and r.home.path is oldest])

    def add(self, chunk: int, start: int, generation: int, context: tuple[bytes, ...], home: Home) -> int | None:
        if isinstance(home, PathHome) and len(home.path) > self.max_path_tokens:
            return None
        peers = [r for r in self.records if r.chunk == chunk]
        if generation and any(r.generation == 0 and r.context == context for r in peers):
            return None
        same = [r for r in peers if (r.start, r.context) == (start, context)]
        if same and same[0].generation < generation:
            return None
        if same and same[0].generation == generation:
            same[0].home = home
            self.use(same[0])
            self.make_path_room(0)
            self.forget_unheld()
            return same[0].variant_id
        if not same and len(peers) >= self.max_per_chunk and generation > max(r.generation for r in peers):
            return None
        worse = [r for r in peers if r.generation and r.context == context]
        self.drop(worse if generation == 0 else same)
        peers = [r for r in self.records if r.chunk == chunk]
        if len(peers) >= self.max_per_chunk:
            self.drop([sorted(peers, key=lambda r: (-r.generation, r.last_use))[0]])
        if isinstance(home, PathHome) and home.path not in self.paths():
            self.make_path_room(len(home.path))
        while len(self.records) >= self.max_variants:
            self.drop([min(self.records, key=lambda r: (r.generation == 0, r.last_use))])
        record = Record(self.next_id, chunk, start, generation, context, home)
        self.next_id += 1
        self.records.append(record)
        self.use(record)
        return record.variant_id


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        max_variants=st.integers(1, 8), max_per_chunk=st.integers(1, 3), max_path_tokens=st.sampled_from((12, 30, 200))
    )
    def start(self, max_variants: int, max_per_chunk: int, max_path_tokens: int) -> None:
        self.index = ChunkIndex(max_variants, max_per_chunk, max_path_tokens)
        self.model = Model(max_variants, max_per_chunk, max_path_tokens)
        self.stored: dict[PathTokens | NodeHome, int] = {}  # home -> leading tokens that are still in the store

    def resolve(self, variant: Variant | Record) -> int:
        home = variant.home
        length = variant.length if isinstance(variant, Variant) else LENS[variant.chunk]
        left = self.stored[home.path] - home.start if isinstance(home, PathHome) else self.stored[home]
        return max(0, min(length, left))

    def add(self, chunk: int, start: int, generation: int, context: tuple[bytes, ...], home: Home) -> bool:
        wanted = self.index.wants(KEYS[chunk], start=start, generation=generation, context=context)
        variant = self.index.add(
            KEYS[chunk], length=LENS[chunk], start=start, generation=generation, context=context, home=home
        )
        expected = self.model.add(chunk, start, generation, context, home)
        assert (variant.variant_id if variant else None) == expected
        fits = not isinstance(home, PathHome) or len(home.path) <= self.index.max_path_tokens
        assert (variant is not None) == (wanted and fits)
        assert variant is None or variant.home is home
        return variant is not None

    @rule(chunks=st.lists(CHUNKS, min_size=1, max_size=4), system_len=st.integers(0, 2), tail_len=st.integers(0, 3))
    def remember_exact_prompt(self, chunks: list[int], system_len: int, tail_len: int) -> None:
        total = system_len + sum(LENS[c] for c in chunks) + tail_len
        path = PathTokens(array("q", range(total)), Partition())
        self.stored[path] = total
        start, context = system_len, ()
        for chunk in chunks:
            self.add(chunk, start, 0, context, PathHome(path, start))
            start, context = start + LENS[chunk], (*context, KEYS[chunk])

    @rule(
        chunk=CHUNKS,
        start=st.integers(0, 4),
        generation=st.integers(0, 3),
        context=st.lists(CHUNKS, max_size=2),
        padding=st.integers(0, 2),
    )
    def remember_node(self, chunk: int, start: int, generation: int, context: list[int], padding: int) -> None:
        home = NodeHome(array("q", range(LENS[chunk] + padding)), "chunk")
        self.stored[home] = LENS[chunk]
        self.add(chunk, start, generation, tuple(KEYS[c] for c in context), home)

    @rule(data=st.data())
    def store_evicts(self, data: st.DataObject) -> None:
        if self.stored:
            home = data.draw(st.sampled_from(list(self.stored)))
            self.stored[home] = data.draw(st.integers(0, self.stored[home]))

    @rule(chunk=CHUNKS, max_generation=st.none() | st.integers(0, 3), use=st.booleans())
    def look_up(self, chunk: int, max_generation: int | None, use: bool) -> None:
        peers = sorted((r for r in self.model.records if r.chunk == chunk), key=lambda r: (r.generation, -r.last_use))
        allowed = [r for r in peers if max_generation is None or r.generation <= max_generation]
        covered = [self.resolve(r) for r in allowed]
        found = self.index.lookup(KEYS[chunk], self.resolve, max_generation=max_generation)

        full = LENS[chunk] in covered
        seen = allowed[: covered.index(LENS[chunk])] if full else allowed
        self.model.drop([r for r in seen if self.resolve(r) == 0])
        if not any(covered):
            reason = "not_stored" if not peers else "generation_limit" if len(allowed) < len(peers) else "evicted"
            assert (found.variant, found.covered_len, found.reason) == (None, 0, reason)
            return
        best = allowed[covered.index(max(covered))]
        assert found.variant is not None
        assert (found.variant.variant_id, found.covered_len, found.reason) == (best.variant_id, max(covered), None)
        if use:
            assert self.index.touch(found.variant)
            self.model.use(best)
            best.num_uses += 1

    @rule(variant_id=st.integers(0, 20))
    def discard(self, variant_id: int) -> None:
        known = [r for r in self.model.records if r.variant_id == variant_id]
        assert self.index.discard(variant_id) == bool(known)
        self.model.drop(known)

    @rule(data=st.data())
    def discard_home(self, data: st.DataObject) -> None:
        if self.stored:
            home = data.draw(st.sampled_from(list(self.stored)))
            known = [r for r in self.model.records if (r.home.path if isinstance(r.home, PathHome) else r.home) is home]
            assert self.index.discard_home(home) == len(known)
            self.model.drop(known)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.drop(self.model.records)

    @invariant()
    def index_equals_model(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity(self.resolve)
        records = sorted(self.model.records, key=lambda r: (r.generation == 0, r.last_use))
        assert [
            (v.variant_id, v.key, v.start, v.generation, v.context, id(v.home), v.last_use, v.num_uses)
            for v in self.index
        ] == [
            (r.variant_id, KEYS[r.chunk], r.start, r.generation, r.context, id(r.home), r.last_use, r.num_uses)
            for r in records
        ]
        assert self.index.num_chunks == len({r.chunk for r in records})
        assert self.index.num_path_tokens == sum(len(p) for p in self.model.paths())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
