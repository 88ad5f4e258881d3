from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from chunk_cache.index.chunk_index import TOKENS_PER_LOOK, ChunkIndex
from chunk_cache.index.lookup import Lookup
from chunk_cache.index.need import Need
from chunk_cache.index.variant import NodeHome, PathHome, PathTokens, Variant
from chunk_cache.index.variant_table import MAX_GONE_KEYS
from chunk_cache.keys import Partition

LENGTH = 4
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def path_of(num_tokens: int = 40) -> PathTokens:
    return PathTokens(array("q", range(num_tokens)), Partition())


def node(name: str = "n") -> NodeHome:
    return NodeHome(array("q", range(LENGTH)), name)


def add(
    index: ChunkIndex,
    key: bytes,
    home: PathTokens | NodeHome | None = None,
    *,
    start: int = 0,
    generation: int = 0,
    context: tuple[bytes, ...] = (),
) -> Variant | None:
    where = PathHome(home, start) if isinstance(home, PathTokens) else home or node()
    return index.add(key, length=LENGTH, start=start, generation=generation, context=context, home=where)


def added(variant: Variant | None) -> Variant:
    assert variant is not None
    return variant


def stored(**lens: int) -> Callable[[Variant], int]:
    """Everything is stored, but for the variants named ``v<id>``."""
    return lambda variant: lens.get(f"v{variant.variant_id}", variant.length)


ALL = stored()


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(max_variants=100, max_variants_per_chunk=3, max_path_tokens=1000)


def test_unknown_chunk_is_not_stored(index: ChunkIndex) -> None:
    assert index.lookup(A, ALL) == Lookup(None, 0, "not_stored")


def test_stored_chunk_is_found(index: ChunkIndex) -> None:
    variant = added(add(index, A, path_of(), start=8, context=(B,)))
    assert index.lookup(A, ALL) == Lookup(variant, LENGTH, None)
    assert (variant.start, variant.context, variant.generation, variant.num_uses) == (8, (B,), 0, 0)
    assert index.get(variant.variant_id) is variant
    index.check_integrity(ALL)


def test_what_was_prepared_is_used_behind_any_chunks_and_what_is_exact_behind_its_own(index: ChunkIndex) -> None:
    alone = added(add(index, A))
    where = {"length": LENGTH, "start": 9, "generation": 1, "home": node("p")}
    prepared = added(index.add(A, context=(B,), is_prepared=True, **where))  # type: ignore[arg-type]
    assert index.lookup(A, ALL, Need(1, context=(C,))).variant is prepared
    assert index.lookup(A, ALL, Need(1)).variant is alone


def test_a_chunk_without_variants_stays_evicted_until_it_is_added_again(index: ChunkIndex) -> None:
    add(index, A, path_of())
    for _ in range(2):
        assert index.lookup(A, lambda _: 0).reason == "evicted"
        assert (index.why_gone(A), index.why_gone(B)) == ("evicted", "not_stored")
        assert (len(index), index.num_chunks, index.num_paths, index.num_path_tokens) == (0, 0, 0, 0)
    variant = added(add(index, A))
    index.discard(variant.variant_id)
    assert index.lookup(A, ALL).reason == "not_stored"


def test_a_sweep_gives_each_variant_its_turn(index: ChunkIndex) -> None:
    variants = [added(add(index, bytes([i]) * 16, node(f"n{i}"))) for i in range(50)]
    looks: list[int] = []

    def resolve(variant: Variant) -> int:
        looks.append(variant.variant_id)
        return 0 if variant.variant_id % 5 == 0 else variant.length

    assert [index.sweep(resolve, 19 * TOKENS_PER_LOOK + 7) for _ in range(3)] == [4, 4, 2]
    assert looks == [*range(50), *(i for i in range(50) if i % 5)][:60]
    assert len(index) == 40
    assert index.lookup(variants[0].key, ALL).reason == "evicted"
    index.check_integrity(ALL)


@pytest.mark.parametrize("num_dropped", range(60, 75))
def test_a_sweep_among_turns_that_are_nobodys(num_dropped: int) -> None:
    """Hot variants stay in front while others are dropped behind them; then everything is gone at once."""
    index = ChunkIndex(max_variants=10, max_variants_per_chunk=3, max_path_tokens=1000)
    hot = [added(add(index, bytes([i]) * 16)) for i in range(9)]
    for i in range(num_dropped):
        for variant in hot:
            index.touch(variant)
        add(index, i.to_bytes(16))
    assert index.sweep(lambda _: 0, 10**6) == 10
    assert len(index) == 0
    index.check_integrity(ALL)


def test_only_the_newest_evicted_chunks_are_remembered(index: ChunkIndex) -> None:
    for i in range(MAX_GONE_KEYS + 1):
        add(index, i.to_bytes(16))
        index.sweep(lambda _: 0, 0)
    assert [index.lookup(i.to_bytes(16), ALL).reason for i in (0, 1)] == ["not_stored", "evicted"]


def test_turns_do_not_pile_up_where_nothing_is_swept(index: ChunkIndex) -> None:
    for i in range(1000):
        add(index, (i % 3).to_bytes(16), node(), start=i)
        index.check_integrity()


def test_full_cover_wins_over_a_partial_one_of_a_lower_generation(index: ChunkIndex) -> None:
    exact = added(add(index, A))
    derived = added(add(index, A, node("d"), generation=2, context=(B,)))
    assert index.lookup(A, stored(v0=2)) == Lookup(derived, LENGTH, None)
    assert index.lookup(A, stored(v0=2, v1=3)) == Lookup(derived, 3, None)
    assert index.lookup(A, stored(v0=3, v1=3)) == Lookup(exact, 3, None)
    assert len(index) == 2


def test_lower_generation_wins_then_the_most_recently_used(index: ChunkIndex) -> None:
    derived = added(add(index, A, generation=1, context=(C,)))
    first = added(add(index, A, node("x"), start=4, context=(B,)))
    second = added(add(index, A, node("y"), start=8, context=(B, C)))
    index.touch(derived)
    assert index.lookup(A, ALL).variant is second
    index.touch(first)
    assert index.lookup(A, ALL).variant is first
    assert (derived.num_uses, first.num_uses, second.num_uses) == (1, 1, 0)


def test_generation_limit(index: ChunkIndex) -> None:
    add(index, A, generation=3)
    assert index.lookup(A, ALL, Need(2)).reason == "generation_limit"
    assert index.lookup(A, ALL, Need(3)).variant is not None
    assert len(index) == 1


def test_only_what_was_prepared_or_computed_alone_is_trusted(index: ChunkIndex) -> None:
    need = Need(1, context=(C,), is_system_fixed=True, is_trust_limited=True)
    add(index, A, context=(B,))
    fixed = added(add(index, A, node("f"), start=4, generation=1))
    assert index.lookup(A, ALL, need).reason == "untrusted", "chunks behind it may have steered how it was fixed"
    alone = added(add(index, A, node("a"), start=8))
    assert index.lookup(A, ALL, need).variant is alone
    assert index.lookup(A, ALL, Need(1)).variant in (alone, fixed)


def test_case_1_same_prompt_again_is_remembered_once(index: ChunkIndex) -> None:
    first = add(index, A, path_of(), start=8)
    newest = path_of()
    again = added(add(index, A, newest, start=8))
    assert again is first
    assert again.home == PathHome(newest, 8)
    assert (len(index), index.num_paths, index.num_path_tokens) == (1, 1, 40)
    index.check_integrity()


def test_longer_prompt_takes_the_chunks_of_the_shorter_one_over(index: ChunkIndex) -> None:
    short, long = path_of(40), path_of(60)
    add(index, A, short)
    add(index, B, short, start=8, context=(A,))
    add(index, A, long)
    assert index.num_path_tokens == 100
    add(index, B, long, start=8, context=(A,))
    assert (index.num_paths, index.num_path_tokens) == (1, 60)


def test_derived_is_refused_beside_an_exact_one_of_the_same_context(index: ChunkIndex) -> None:
    add(index, A, path_of(), context=(B,))
    for start in (0, 8):
        assert not index.wants(A, start=start, generation=1, context=(B,))
        assert add(index, A, start=start, generation=1, context=(B,)) is None
    assert index.wants(A, start=0, generation=1, context=(C,))
    assert add(index, A, generation=1, context=(C,)) is not None


def test_exact_takes_the_place_of_derived_ones_of_its_context(index: ChunkIndex) -> None:
    add(index, A, node("x"), generation=1, context=(B,))
    add(index, A, node("y"), start=8, generation=2, context=(B,))
    other = added(add(index, A, node("z"), generation=1, context=(C,)))
    exact = added(add(index, A, path_of(), start=16, context=(B,)))
    assert set(index) == {other, exact}
    index.check_integrity(ALL)


def test_derived_again_keeps_the_lower_generation(index: ChunkIndex) -> None:
    add(index, A, node("two"), generation=2)
    better = node("one")
    assert added(add(index, A, better, generation=1)).home is better
    assert add(index, A, node("three"), generation=3) is None
    newest = node("one again")
    assert added(add(index, A, newest, generation=1)).home is newest
    assert [v.generation for v in index] == [1]
    index.check_integrity()


def test_bound_per_chunk_drops_the_highest_generation_then_the_oldest(index: ChunkIndex) -> None:
    first = added(add(index, A, node("1"), start=0))
    add(index, A, node("2"), start=1)
    add(index, A, node("3"), start=2, generation=1, context=(B,))
    assert not index.wants(A, start=3, generation=2, context=(C,))
    assert add(index, A, node("4"), start=3, generation=2, context=(C,)) is None
    fourth = added(add(index, A, node("5"), start=3, generation=1, context=(C,)))
    assert [v.start for v in index] == [3, 0, 1]
    add(index, A, node("6"), start=4)
    index.touch(first)
    add(index, A, node("7"), start=5)
    assert [v.start for v in index] == [4, 0, 5]
    assert index.get(fourth.variant_id) is None
    index.check_integrity()


def test_bound_of_all_drops_derived_first_then_the_oldest() -> None:
    index = ChunkIndex(max_variants=3, max_variants_per_chunk=3, max_path_tokens=1000)
    oldest = added(add(index, A, node("1")))
    add(index, B, node("2"))
    add(index, C, node("3"), generation=1)
    add(index, b"d" * 16, node("4"))
    assert [v.key for v in index] == [A, B, b"d" * 16]
    index.touch(oldest)
    add(index, b"e" * 16, node("5"), generation=1)  # the new one is never the one that goes
    assert [v.key for v in index] == [b"e" * 16, b"d" * 16, A]
    index.check_integrity()


def test_path_bound_forgets_the_least_recently_used_path_with_all_its_chunks() -> None:
    index = ChunkIndex(max_variants=100, max_variants_per_chunk=3, max_path_tokens=100)
    old, used, new = path_of(40), path_of(40), path_of(40)
    kept = added(add(index, A, used, start=4))
    add(index, B, old)
    add(index, C, old, start=8)
    index.touch(kept)
    add(index, B, new, start=12)
    assert [(v.key, v.start) for v in index] == [(A, 4), (B, 12)]
    assert index.num_path_tokens == 80
    assert add(index, C, path_of(101)) is None
    assert len(index) == 2
    index.check_integrity()


def test_a_path_that_moves_in_by_a_refresh_obeys_the_bound() -> None:
    index = ChunkIndex(max_variants=100, max_variants_per_chunk=3, max_path_tokens=100)
    first = path_of(60)
    add(index, A, first)
    add(index, B, first, start=4)
    add(index, A, path_of(70))
    assert [v.key for v in index] == [A]
    assert index.num_path_tokens == 70
    index.check_integrity()


def test_discard_one_variant_at_a_time(index: ChunkIndex) -> None:
    path, own = path_of(), node()
    first = added(add(index, A, path))
    others = [added(add(index, B, path, start=4)), added(add(index, C, own))]
    assert index.discard(first.variant_id)
    assert not index.discard(first.variant_id)
    assert not index.touch(first)
    assert all(index.discard(other.variant_id) for other in others)
    assert len(index) == 0
    index.check_integrity()


def test_clear_forgets_all_but_ids_go_on(index: ChunkIndex) -> None:
    add(index, A, path_of())
    add(index, B)
    index.clear()
    assert (len(index), index.num_chunks, index.num_paths, index.num_path_tokens) == (0, 0, 0, 0)
    assert added(add(index, A)).variant_id == 2
    index.check_integrity()


def test_stats_count_what_happened(index: ChunkIndex) -> None:
    add(index, A, path_of())
    add(index, A, path_of())
    add(index, A, generation=1)
    index.lookup(A, ALL)
    index.lookup(A, lambda _: 1)
    index.lookup(A, lambda _: 0)
    stats = index.stats()
    assert {k: v for k, v in stats.items() if v} == {
        "num_added": 1,
        "num_refreshed": 1,
        "num_refused": 1,
        "num_gone": 1,
        "num_lookups": 3,
        "num_full": 1,
        "num_partial": 1,
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index._table.by_key.clear(),
        lambda index: setattr(index.lookup(B, ALL).variant.home, "variant_id", 7),
        lambda index: index._table.paths.clear(),
        lambda index: setattr(index._table.paths, "total_tokens", 7),
        lambda index: index._table.order._exact.popitem(),
        lambda index: index._table.order._exact.move_to_end(0),
        lambda index: setattr(index, "max_variants", 2),
        lambda index: setattr(next(iter(index)), "generation", 0),
        lambda index: index._table.by_key[A].append(index._table.by_key[A][0]),
    ],
)
def test_check_integrity_sees_damage(index: ChunkIndex, damage: Callable[[ChunkIndex], object]) -> None:
    add(index, A, path_of())
    add(index, B, node("b"))
    add(index, C, node("c"), generation=1)
    index.check_integrity(ALL)
    damage(index)
    with pytest.raises(AssertionError):
        index.check_integrity(ALL)


def test_misuse_is_an_assertion(index: ChunkIndex) -> None:
    path = path_of(10)
    with pytest.raises(AssertionError, match="exact KV only"):
        add(index, A, path, generation=1)
    with pytest.raises(AssertionError, match="outside"):
        add(index, A, path, start=7)
    with pytest.raises(AssertionError, match="computed at position 2"):
        index.add(A, length=LENGTH, start=2, generation=0, context=(), home=PathHome(path, 1))
    own = node()
    add(index, A, own)
    with pytest.raises(AssertionError, match="already the home"):
        add(index, B, own)
    with pytest.raises(AssertionError, match="tokens stored"):
        index.lookup(A, lambda _: LENGTH + 1)


def test_victims_of_partitions_above_their_share_come_first() -> None:
    index = ChunkIndex(100, 8, 10_000, partition_share=0.5)
    tenants = [Partition(name) for name in ("one", "two", "three")]
    for i in range(9):
        home = NodeHome(array("q", range(10)), "", partition=tenants[i % 3])
        index.add(bytes([i]) * 16, length=10, start=0, generation=1, context=(), home=home)
    owners = [tenant.key for tenant in tenants]
    assert [variant.key[0] for variant in index.victims([])] == list(range(9))
    assert [variant.key[0] for variant in index.victims([owners[1]])] == [1, 4, 7, 0, 2, 3, 5, 6, 8]
    unknown = Partition("none of the index").key
    assert [variant.key[0] for variant in index.victims([unknown, owners[2]])] == [2, 5, 8, 0, 1, 3, 4, 6, 7]
