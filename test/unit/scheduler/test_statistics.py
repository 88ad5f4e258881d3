"""Statistics of chunks: read-only arrays, and what an index does with them when a variant is computed again."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.chunk_statistics import STATISTICS, ChunkStatistics
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.methods import METHODS


def some(value: float) -> ChunkStatistics:
    return ChunkStatistics(np.full(4, value, dtype=np.float32), np.full(4, value + 0.5, dtype=np.float32))


def test_by_name() -> None:
    statistics = some(1.0)
    np.testing.assert_array_equal(statistics.of("outside"), np.full(4, 1.0))
    np.testing.assert_array_equal(statistics.of("received"), np.full(4, 1.5))
    assert {method.statistic for method in METHODS.values()} == {None, *STATISTICS}


def test_nobody_writes_to_them() -> None:
    statistics = some(1.0)
    for name in STATISTICS:
        with pytest.raises(ValueError, match="read-only"):
            statistics.of(name)[0] = 2.0
    with pytest.raises(AttributeError):
        statistics.outside = statistics.received  # type: ignore[misc]


def test_bytes_are_equal_where_all_numbers_are() -> None:
    def of(
        outside: list[float], received: list[float], inter: list[float], cci: float, system: tuple[float, ...] = ()
    ) -> bytes:
        own, from_others, on_context, on_system = (
            np.array(values, dtype=np.float32) for values in (outside, received, inter, system)
        )
        return ChunkStatistics(own, from_others, on_context, cci, on_system).tobytes()

    nan = float("nan")
    base = of([1, nan], [3, 4], [5], 0.7)
    assert of([1, nan], [3, 4], [5], 0.7) == base
    others = [of([2, nan], [3, 4], [5], 0.7), of([1, 2], [3, 4], [5], 0.7), of([1, nan], [3, 0], [5], 0.7)]
    others += [of([1, nan], [3, 4], [6], 0.7), of([1, nan], [3, 4], [5], 0.8), of([1, nan], [3, 4], [], 0.7)]
    assert len({base, *others}) == 7
    assert of([1], [3], [4, 5], 0.7) != of([1, 3], [4, 5], [], 0.7), "the same numbers, of other things"
    assert of([1], [3], [5], 0.7, (4,)) != of([1], [3], [4, 5], 0.7), "the same numbers, of other things"


def test_misuse_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="unknown statistic 'inside'"):
        some(1.0).of("inside")
    with pytest.raises(AssertionError, match=r"\(4,\), \(3,\)"):
        ChunkStatistics(np.zeros(4, dtype=np.float32), np.zeros(3, dtype=np.float32))


def test_the_index_keeps_them_with_the_variant_until_newer_ones_come() -> None:
    index = ChunkIndex(max_variants=10, max_variants_per_chunk=3, max_path_tokens=100)

    def add(statistics: ChunkStatistics | None, generation: int = 1) -> Variant:
        home = NodeHome(array("q", range(4)), "n")
        variant = index.add(
            b"a" * 16, length=4, start=0, generation=generation, context=(), home=home, statistics=statistics
        )
        assert variant is not None
        index.check_integrity()
        return variant

    old, new = some(1.0), some(2.0)
    assert add(None).statistics is None
    variant = add(old)
    assert variant.statistics is old
    assert add(None) is variant
    assert variant.statistics is old
    assert add(new) is variant
    assert variant.statistics is new
    # Another KV takes its place: what the old one received says nothing about it.
    assert add(None, generation=0).statistics is None


def test_found_tokens_keep_the_numbers_that_were_taken_before() -> None:
    nan = float("nan")
    old = ChunkStatistics(np.array([1, 2, nan], np.float32), np.array([4, 5, nan], np.float32))
    new = ChunkStatistics(np.array([nan, 7, 8], np.float32), np.array([nan, 9, 10], np.float32))
    merged = new.filled_from(old)
    np.testing.assert_array_equal(merged.outside, [1, 7, 8])
    np.testing.assert_array_equal(merged.received, [4, 9, 10])
    assert new.filled_from(None) is new


def test_sums_of_a_part_are_scaled_to_the_chunk_and_the_fuller_ones_stay() -> None:
    nan = float("nan")
    whole = ChunkStatistics.taken(
        np.full(4, 0.5, np.float32), np.ones(4, np.float32), np.array([4.0], np.float32), 2.0, [8]
    )
    part = ChunkStatistics.taken(
        np.array([nan, nan, 0.5, 0.5], np.float32), np.ones(4, np.float32), np.array([2.0], np.float32), 1.0, [8]
    )
    # a = 4 / (4 * 8), b = 2 / 16 (Cache-Craft eq. 9 and 10)
    assert whole.cci == part.cci == pytest.approx(1 / (1 + np.exp(-1)))
    np.testing.assert_array_equal(part.inter, whole.inter)
    other = ChunkStatistics.taken(
        np.array([0.5, nan, nan, nan], np.float32), np.ones(4, np.float32), np.array([9.0], np.float32), 1.0, [8]
    )
    assert other.filled_from(part).cci == part.cci
    assert part.filled_from(other).cci == part.cci


@pytest.mark.parametrize(("num_pieces", "expected"), [(0, []), (1, [7.0]), (3, [1, 2, 4]), (4, [1, 2, 4, 0])])
def test_what_was_fixed_elsewhere_gave_as_much_to_its_system_prompt(num_pieces: int, expected: list[float]) -> None:
    values = np.arange(5, dtype=np.float32)
    old = ChunkStatistics(values, values, np.array([1, 2], np.float32), 0.7, np.array([1, 2, 4], np.float32))
    new = old.behind(3, num_pieces)
    assert (new.inter.tolist(), new.system.tolist(), new.cci) == ([0.0] * 3, expected, old.cci)
    assert new.received.tolist() == old.received.tolist()
