"""Each method: the shared suite, and what is its own. The scored ones are in test_methods_scored.py."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError, show
from chunk_cache.methods import METHODS, Method, find_method, num_rows_at
from chunk_cache.methods.base import AllReused
from unit.scheduler.method_suite import KEYS, LENS, RATIOS, MethodSuite, shared

# A statistic as it is stored: many ties, some tokens without one, and nothing else that is special.
SCORES = st.sampled_from((0.0, 0.25, 0.5, 1.0, 3.0, math.nan)) | st.floats(0, 100, width=32)


@given(st.integers(0, 1000), st.integers(0, 5000))
def test_rows_are_the_ceiling_of_the_ratio_as_it_was_written(thousandths: int, num_tokens: int) -> None:
    exact = Fraction(thousandths, 1000) * num_tokens
    assert num_rows_at(thousandths / 1000, num_tokens) == math.ceil(exact)


@pytest.mark.parametrize(
    ("ratio", "num_tokens", "expected"),
    [
        *[(0.1, 10, 1), (0.07, 100, 7), (0.1 + 0.2, 10, 3), (1 / 3, 3, 1), (2 / 3, 3, 2), (0.15, 400, 60)],
        *[(0.15, 401, 61), (0.0, 10, 0), (-0.0, 10, 0), (1.0, 10, 10), (0.5, 0, 0), (1e-12, 10, 1), (1 - 1e-16, 7, 7)],
    ],
)
def test_rows_at_awkward_ratios(ratio: float, num_tokens: int, expected: int) -> None:
    assert num_rows_at(ratio, num_tokens) == expected


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan])
def test_ratio_outside_its_range_is_an_assertion(ratio: float) -> None:
    with pytest.raises(AssertionError, match="outside"):
        num_rows_at(ratio, 10)


# The registry.


@pytest.mark.parametrize("name", ["best", "", "Epic", None, 3, True, ["epic"]])
def test_unknown_methods_are_refused_alike(name: object) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        find_method(name, "p.method")
    assert str(caught.value) == f"p.method: unknown method {show(name)}; known methods: {', '.join(METHODS)}"


def test_names_are_those_of_the_contract() -> None:
    contract = {"full-reuse", "random", "epic", "cacheblend", "cache-craft", "a3", "fusionrag", "cacheclip", "h2o"}
    assert METHODS.keys() == contract | {
        "full",
        "near",
        "near-words",
        "lego-link",
        "seams",
        "infoflow",
        "question-drift",
    }


def test_methods_are_found_by_their_name() -> None:
    assert all(find_method(name, "p") is method and method.name == name for name, method in METHODS.items())


def test_every_method_has_a_test_that_inherits_the_suite() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    for name in METHODS:
        assert f'Suite):\n    method = METHODS["{name}"]' in tests


def test_negative_lengths_are_an_assertion() -> None:
    for offset, num in ((-1, 3), (3, -1)):
        with pytest.raises(AssertionError, match="negative length"):
            METHODS["epic"].rows_for_chunk(offset, num, 0.5)


# Methods that look at nothing.


class TestFullReuse(MethodSuite):
    method = METHODS["full-reuse"]

    def test_ratio_is_zero_whatever_was_asked(self) -> None:
        assert [self.method.effective_ratio(r, 0.15) for r in (None, 0.0, 0.3, 1.0)] == [0.0] * 4


class TestFull(MethodSuite):
    method = METHODS["full"]

    def test_ratio_is_one_whatever_was_asked(self) -> None:
        assert [self.method.effective_ratio(r, 0.15) for r in (None, 0.0, 0.3, 1.0)] == [1.0] * 4


class TestEpic(MethodSuite):
    method = METHODS["epic"]

    def test_it_takes_the_first_tokens(self) -> None:
        np.testing.assert_array_equal(self.method.rows_for_chunk(3, 10, 0.25), [0, 1, 2])


def spans_of(edges: list[int]) -> list[tuple[int, int]]:
    """Spans between these, two by two, with gaps between them."""
    return list(zip(edges[::2], edges[1::2], strict=False))


SPANS = st.lists(st.integers(0, 1500), min_size=2, max_size=16, unique=True).map(sorted).map(spans_of)


class TestNear(MethodSuite):
    method = METHODS["near"]

    def test_rows_of_a_chunk_are_its_first(self) -> None:
        np.testing.assert_array_equal(self.method.rows_for_chunk(3, 10, 0.25), [0, 1, 2])

    def test_passages_in_front_of_the_question_get_most(self) -> None:
        spans = [(100, 250), (250, 400), (400, 550), (550, 700), (700, 1000)]
        assert counts_of(self.method, spans, 1000, 0.15) == [5, 7, 10, 13, 100]
        assert counts_of(self.method, spans[:2], 5000, 0.15) == [22, 23]  # far away all are alike

    def test_what_is_too_much_for_one_goes_to_the_next(self) -> None:
        assert counts_of(self.method, [(0, 500), (500, 520)], 520, 0.5) == [240, 20]

    @shared
    @given(reused=SPANS, behind=st.integers(0, 400), ratio=RATIOS)
    def test_counts_are_the_ratio_of_all_and_more_where_it_is_nearer(
        self, reused: list[tuple[int, int]], behind: int, ratio: float
    ) -> None:
        lens = [end - start for start, end in reused]
        counts = counts_of(self.method, reused, reused[-1][1] + behind, ratio)
        assert sum(counts) == num_rows_at(ratio, sum(lens))
        assert all(0 <= count <= length for count, length in zip(counts, lens, strict=True))
        for (far, near), (far_len, near_len) in zip(pairwise(counts), pairwise(lens), strict=True):
            assert far / far_len <= near / near_len + 1 / far_len + 1 / near_len  # but for whole rows


def rows_of(
    method: Method, spans: list[tuple[int, int]], question_start: int, ratio: float, rankings: Any = None, **more: Any
) -> list[list[int]]:
    """Rows of each chunk, from its first reused token on."""
    ranking = None if rankings is None else np.concatenate(rankings)
    reused = AllReused(spans, question_start, ranking=ranking, **more)
    rows = method.rows_of_all(ratio, reused).tolist()
    starts = [sum(reused.lens[:i]) for i in range(len(spans))]
    return [[r - at for r in rows if at <= r < at + n] for at, n in zip(starts, reused.lens, strict=True)]


def counts_of(method: Method, spans: list[tuple[int, int]], question_start: int, ratio: float) -> list[int]:
    """Rows of each chunk, which are its first."""
    rows = rows_of(method, spans, question_start, ratio)
    assert all(own == list(range(len(own))) for own in rows)
    return list(map(len, rows))


class TestSeams(MethodSuite):
    method = METHODS["seams"]

    def test_seams_are_computed_at_any_ratio_and_whole_chunks_as_far_as_it_reaches(self) -> None:
        spans = [(0, 100), (100, 140), (140, 144), (150, 210)]
        for ratio, counts in ((0.0, [8, 8, 4, 8]), (0.2, [8, 8, 4, 8]), (0.4, [8, 8, 4, 60]), (0.5, [8, 8, 4, 60])):
            rows = rows_of(self.method, spans, 220, ratio, seam_len=8)
            assert rows == [list(range(count)) for count in counts]
        assert counts_of(self.method, spans, 220, 1.0) == [100, 40, 4, 60]

    def test_the_highest_cfo_comes_first_and_what_does_not_fit_is_passed_over(self) -> None:
        spans = [(0, 100), (100, 140), (140, 200)]
        rows = rows_of(self.method, spans, 220, 0.4, cfos=[0.9, 0.5, None], seam_len=8)
        assert list(map(len, rows)) == [8, 40, 8]

    @shared
    @given(reused=SPANS, ratio=RATIOS, seam_len=st.integers(3, 90))
    def test_a_chunk_is_computed_whole_or_its_seam(
        self, reused: list[tuple[int, int]], ratio: float, seam_len: int
    ) -> None:
        rows = rows_of(self.method, reused, reused[-1][1], ratio, seam_len=seam_len)
        seams = [min(seam_len, end - start) for start, end in reused]
        for own, seam, (start, end) in zip(rows, seams, reused, strict=True):
            assert own in (list(range(seam)), list(range(end - start)))
        most = num_rows_at(ratio, sum(end - start for start, end in reused))
        assert sum(map(len, rows)) <= max(most, sum(seams))


class TestNearWords(MethodSuite):
    method = METHODS["near-words"]

    def test_a_third_are_the_highest_ranked_of_all(self) -> None:
        ranking = np.zeros(30, dtype=np.float32)
        ranking[[0, 9, 10, 11, 15]] = 9.0, 2.0, 3.0, 2.0, 1.0
        rankings = [np.zeros(30, dtype=np.float32), ranking]
        assert rows_of(self.method, [(0, 30), (30, 60)], 60, 0.2, rankings) == [[0, 1], [*range(6), 9, 10, 11, 15]]
        # Of equals the first ones.
        rankings[1] = np.where(ranking > 0, np.float32(1), np.float32(0))
        assert rows_of(self.method, [(0, 30), (30, 60)], 60, 0.15, rankings) == [[0], [*range(5), 9, 10, 11]]

    def test_where_few_words_stand_first_tokens_take_their_rows(self) -> None:
        one = np.zeros(100, dtype=np.float32)
        one[50] = 1.0
        assert rows_of(self.method, [(0, 100)], 100, 0.1, [one]) == [[*range(9), 50]]
        without = rows_of(self.method, [(0, 100), (100, 200)], 200, 0.3)
        near = counts_of(METHODS["near"], [(0, 100), (100, 200)], 200, 0.3)
        assert all(abs(len(own) - count) <= 1 for own, count in zip(without, near, strict=True))

    def test_blocks_are_chosen_by_their_mean(self) -> None:
        ranking = np.zeros(30, dtype=np.float32)
        ranking[[14, 22, 23]] = 9.0, 5.0, 5.0
        blocks = {"blocks": np.arange(30) // 5}
        assert rows_of(self.method, [(0, 30)], 30, 0.5, [ranking], **blocks) == [[*range(10), *range(20, 25)]]

    def test_a_budget_of_its_own_is_shared_alike(self) -> None:
        ranking = np.zeros(30, dtype=np.float32)
        ranking[[9, 10, 11]] = 2.0, 3.0, 2.0
        assert self.method.rows_for_chunk(0, 30, 0.2, ranking=ranking).tolist() == [*range(4), 9, 10]

    @shared
    @given(reused=SPANS, behind=st.integers(0, 400), ratio=RATIOS, data=st.data())
    def test_the_ratio_of_all_tokens_is_taken_once(
        self, reused: list[tuple[int, int]], behind: int, ratio: float, data: st.DataObject
    ) -> None:
        lens = [end - start for start, end in reused]
        values = st.sampled_from((0.0, 0.0, 1.0, 2.5))
        drawn = [data.draw(st.lists(values, min_size=n, max_size=n)) for n in (min(n, 40) for n in lens)]
        rankings = [np.resize(np.array(own, dtype=np.float32), n) for own, n in zip(drawn, lens, strict=True)]
        rows = rows_of(self.method, reused, reused[-1][1] + behind, ratio, rankings)
        assert sum(map(len, rows)) == num_rows_at(ratio, sum(lens))
        for own, n in zip(rows, lens, strict=True):
            assert own == sorted(set(own))
            assert not own or (own[0] >= 0 and own[-1] < n)


class TestLegoLink(MethodSuite):
    method = METHODS["lego-link"]

    def test_it_takes_both_ends(self) -> None:
        assert self.method.rows_for_chunk(3, 10, 0.4).tolist() == [0, 1, 8, 9]
        assert self.method.rows_for_chunk(0, 10, 0.25).tolist() == [0, 1, 9]
        assert self.method.rows_for_chunk(0, 10, 0.1).tolist() == [0]

    def test_ends_are_tokens_in_the_place_of_a_share(self) -> None:
        assert self.method.tokens_per_chunk((("ends", 20),)) == 40
        assert self.method.tokens_per_chunk(()) is None


class TestRandom(MethodSuite):
    method = METHODS["random"]

    @given(num=st.integers(2, 300), low=RATIOS, high=RATIOS, key=KEYS)
    def test_a_larger_ratio_selects_a_superset(self, num: int, low: float, high: float, key: bytes) -> None:
        low, high = sorted((low, high))
        few = self.method.rows_for_chunk(0, num, low, seed=5, chunk_key=key)
        many = self.method.rows_for_chunk(0, num, high, seed=5, chunk_key=key)
        assert set(few) <= set(many)

    def test_it_depends_on_seed_key_and_length_and_on_nothing_else(self) -> None:
        def draw(num: int, seed: int, key: bytes, offset: int = 0) -> tuple[int, ...]:
            return tuple(self.method.rows_for_chunk(offset, num, 0.2, seed=seed, chunk_key=key).tolist())

        base = draw(100, 0, b"a" * 16)
        assert base == (0, 4, 7, 11, 12, 14, 15, 20, 39, 41, 49, 52, 53, 59, 66, 91, 93, 95, 96, 99)
        assert base == draw(100, 0, b"a" * 16, offset=9)
        assert len({base, draw(100, 1, b"a" * 16), draw(100, 0, b"b" * 16), draw(101, 0, b"a" * 16)}) == 4

    def test_it_is_uniform(self) -> None:
        num, ratio, num_draws = 50, 0.2, 4000
        counts = np.zeros(num)
        for seed in range(num_draws):
            counts[self.method.rows_for_chunk(0, num, ratio, seed=seed, chunk_key=b"k" * 16)] += 1
        expected = num_draws * ratio
        chi_squared = float(np.sum((counts - expected) ** 2 / (expected * (1 - ratio))))
        assert chi_squared < 85.4  # 0.1 % quantile of 49 degrees of freedom; the draws are fixed, so it never flakes


# Methods that rank by a statistic.


class RankedSuite(MethodSuite):
    """What the methods that rank by a stored statistic add."""

    statistic: str

    def test_statistic(self) -> None:
        assert self.method.statistic == self.statistic

    @shared
    @given(scores=st.lists(SCORES, min_size=1, max_size=40), ratio=RATIOS, offset=LENS)
    def test_the_largest_are_taken_ties_and_tokens_without_one_by_position(
        self, scores: list[float], ratio: float, offset: int
    ) -> None:
        ranking = np.array(scores, dtype=np.float32)
        before = ranking.copy()
        rows = self.method.rows_for_chunk(offset, len(scores), ratio, ranking=ranking)

        def worth(i: int) -> tuple[float, int]:
            return (-math.inf if math.isnan(ranking[i]) else float(ranking[i])), -i

        best = sorted(range(len(scores)), key=worth, reverse=True)[: num_rows_at(ratio, len(scores))]
        assert rows.tolist() == sorted(best)
        assert rows.dtype == np.int64
        np.testing.assert_array_equal(ranking, before)

    def test_tokens_without_a_statistic_come_last(self) -> None:
        ranking = np.array([math.nan, 0.1, math.nan, 0.3, 0.2], dtype=np.float32)
        assert self.method.rows_for_chunk(0, 5, 0.4, ranking=ranking).tolist() == [3, 4]
        assert self.method.rows_for_chunk(0, 5, 0.8, ranking=ranking).tolist() == [0, 1, 3, 4]

    def test_without_statistics_it_takes_the_first_tokens(self) -> None:
        assert self.method.rows_for_chunk(7, 10, 0.25).tolist() == [0, 1, 2]
        nothing = np.full(10, math.nan, dtype=np.float32)
        assert self.method.rows_for_chunk(7, 10, 0.25, ranking=nothing).tolist() == [0, 1, 2]

    def test_a_ranking_of_another_length_is_an_assertion(self) -> None:
        with pytest.raises(AssertionError, match="3 statistics for 4 tokens"):
            self.method.rows_for_chunk(0, 4, 0.5, ranking=np.zeros(3, dtype=np.float32))


class TestH2O(RankedSuite):
    method = METHODS["h2o"]
    statistic = "received"


class TestCacheCraft(RankedSuite):
    method = METHODS["cache-craft"]
    statistic = "outside"


# Methods that rank by the selector's scores.


class TestCacheClip(MethodSuite):
    method = METHODS["cacheclip"]

    def test_windows_of_eight_are_its_default(self) -> None:
        assert [self.method.option((), name) for name in ("group_size", "group_threshold")] == [8, 5]
        assert METHODS["epic"].option((), "group_size") == 0

    def test_it_takes_the_largest_scores(self) -> None:
        ranking = np.array([0.1, 0.5, 0.2, 0.5, 0.0], dtype=np.float32)
        assert self.method.rows_for_chunk(0, 5, 0.4, ranking=ranking).tolist() == [1, 3]


BLOCKS = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3], dtype=np.int64)


@pytest.mark.parametrize("method", ["random", "h2o", "cache-craft", "cacheclip"])
@pytest.mark.parametrize("num_rows", range(1, len(BLOCKS)))
def test_whole_blocks_are_chosen_and_the_last_in_part(method: str, num_rows: int) -> None:
    ranking = np.array([9, 1, 2, 2, np.nan, 2, 8, 8, np.nan, 3, np.nan], dtype=np.float32)
    rows = METHODS[method].rows_for_chunk(2, len(BLOCKS), num_rows / len(BLOCKS), ranking=ranking, blocks=BLOCKS)
    assert len(rows) == num_rows
    chosen = {block: rows[BLOCKS[rows] == block].tolist() for block in set(BLOCKS[rows].tolist())}
    whole = {block: np.flatnonzero(block == BLOCKS).tolist() for block in chosen}
    cut = [block for block in chosen if chosen[block] != whole[block]]
    assert len(cut) <= 1
    assert all(chosen[block] == whole[block][: len(chosen[block])] for block in cut), "its first tokens"
    if method != "random":  # means 5, 2, 6.3 and none
        order = [6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 10]
        assert rows.tolist() == sorted(order[:num_rows])
