"""Cache-Craft's scores: values worked out by hand from the equations, ranges and symmetries, corner cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.index.reusability import (
    NEAREST,
    context_impact,
    first_places,
    share_to_fix,
    unit_cfo,
    use_weight,
)
from chunk_cache.methods import num_rows_at
from unit.scheduler.overlap import adjusted_overlap, fix_overhead, order_penalty, prefix_overlap

masses = st.floats(0.0, 1e4, allow_subnormal=False)
contexts = st.lists(st.integers(0, 8), max_size=8)
distinct = st.lists(st.integers(0, 12), max_size=9, unique=True)


@st.composite
def context_with_mass(draw: st.DrawFn) -> tuple[list[int], np.ndarray]:
    context = draw(contexts)
    return context, np.array(draw(st.lists(masses, min_size=len(context), max_size=len(context))))


def test_context_impact_by_hand() -> None:
    # a = 6 / (4 * 3) + 2 / (4 * 1) = 1, b = 8 / 16 = 0.5
    assert context_impact(np.array([6.0, 2.0]), [3, 1], 8.0, 4) == pytest.approx(1 / (1 + math.exp(-2)))


@given(context_with_mass(), masses, st.integers(1, 500), st.integers(1, 500))
def test_context_impact_is_between_a_half_and_one(
    drawn: tuple[list[int], np.ndarray], intra: float, context_len: int, length: int
) -> None:
    context, inter = drawn
    assert 0.5 <= context_impact(inter, [context_len] * len(context), intra, length) <= 1.0


def test_context_impact_without_context_or_without_own_tokens() -> None:
    assert context_impact(np.array([]), [], 3.0, 7) == 0.5
    assert context_impact(np.array([0.0]), [5], 3.0, 7) == 0.5
    assert context_impact(np.array([0.1]), [5], 0.0, 1) == 1.0


def test_more_mass_outside_is_more_impact() -> None:
    values = [context_impact(np.array([mass, 1.0]), [10, 20], 5.0, 30) for mass in (0.0, 1.0, 2.0, 8.0)]
    assert values == sorted(values)
    assert len(set(values)) == 4


def test_overlap_by_hand() -> None:
    assert prefix_overlap("abc", np.array([1.0, 2.0, 5.0]), "cxa") == 6 / 8
    assert prefix_overlap("aba", np.array([1.0, 2.0, 5.0]), "a") == 6 / 8


@given(context_with_mass(), contexts, st.randoms(use_true_random=False))
def test_overlap_does_not_depend_on_order(drawn: tuple[list[int], np.ndarray], new: list[int], random) -> None:
    context, inter = drawn
    beta = prefix_overlap(context, inter, new)
    assert 0.0 <= beta <= 1.0
    shuffled_new = random.sample(new, len(new))
    order = random.sample(range(len(context)), len(context))
    shuffled = [context[i] for i in order]
    assert prefix_overlap(shuffled, inter[order], shuffled_new) == pytest.approx(beta)


@given(context_with_mass())
def test_overlap_with_itself_is_whole(drawn: tuple[list[int], np.ndarray]) -> None:
    context, inter = drawn
    assert prefix_overlap(context, inter, context) == 1.0
    assert prefix_overlap(context, inter, [*context, 99]) == (1.0 if context else 0.0)


def test_overlap_of_empty_contexts_and_of_no_mass() -> None:
    none = np.array([])
    assert prefix_overlap("", none, "") == 1.0
    assert prefix_overlap("", none, "a") == 0.0
    assert prefix_overlap("ab", np.zeros(2), "b") == 0.5


@given(distinct)
def test_penalty_of_the_same_and_of_the_reversed_order(context: list[int]) -> None:
    assert order_penalty(context, context) == 0.0
    assert order_penalty(context, context[::-1]) == (1.0 if len(context) > 1 else 0.0)


@given(distinct, distinct)
def test_penalty_ignores_chunks_that_are_not_common(old: list[int], new: list[int]) -> None:
    common = set(old) & set(new)
    kept_old, kept_new = ([c for c in chunks if c in common] for chunks in (old, new))
    assert order_penalty(old, new) == order_penalty(kept_old, kept_new) == order_penalty(new, old)


@given(st.floats(0.0, 10.0), st.floats(0.5, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 5000))
def test_overhead_and_tokens_stay_in_range(alpha: float, cci: float, beta: float, gamma: float, length: int) -> None:
    adjusted = adjusted_overlap(beta, gamma)
    assert 0.0 <= adjusted <= beta
    cfo = fix_overhead(alpha, cci, adjusted)
    assert cfo >= 0.0
    tokens = num_rows_at(share_to_fix(cfo), length)
    assert 0 <= tokens <= length
    assert tokens >= min(1.0, cfo) * length * (1 - 1e-8)
    assert 0.0 < use_weight(cfo, length) <= length


def test_overhead_by_hand() -> None:
    assert fix_overhead(2.0, 0.75, adjusted_overlap(0.8, 0.5)) == pytest.approx(0.9)
    assert fix_overhead(3.0, 1.0, 1.0) == 0.0
    assert [num_rows_at(share_to_fix(cfo), 10) for cfo in (0.0, 0.01, 0.5, 1.0, 7.0)] == [0, 1, 5, 10, 10]
    assert use_weight(0.25, 100) == 4.0
    assert use_weight(0.0, 100) == 100.0


@given(context_with_mass(), contexts, st.floats(0.5, 1.0))
def test_unit_cfo_is_what_its_parts_say(drawn: tuple[list[int], np.ndarray], new: list[int], cci: float) -> None:
    context, inter = drawn
    beta = prefix_overlap(context, inter, new)
    expected = fix_overhead(1.0, cci, adjusted_overlap(beta, order_penalty(context, new)))
    expected = expected if context else float(bool(new))  # alone is the worst, whatever the equations say
    assert unit_cfo(cci, context, inter.tolist(), new, first_places(new)) == pytest.approx(expected)


def far_and_near(far: list[int], near: list[int], new: list[int]) -> float:
    """CFO of KV behind pieces of which every one was attended to alike, where CCI is 1."""
    context = far + near
    return unit_cfo(1.0, context, [1.0] * len(context), new, first_places(new))


def test_pieces_far_in_front_count_as_one_that_is_there_or_not() -> None:
    far, near = list(range(36)), list(range(100, 100 + NEAREST))
    assert far_and_near(far, near, far + near) == 0.0
    assert far_and_near(far, near, [*far, 7000, *near]) == 0.0
    assert far_and_near(far, near, [7000, *far, *near]) == pytest.approx(0.36)
    assert far_and_near(far, near, [*reversed(far), *near]) == pytest.approx(0.36)
    assert far_and_near(far, near, far) == pytest.approx(0.64)
    assert far_and_near(far, near, []) == far_and_near(far, near, near[:0] + far[1:]) == 1.0
    num = NEAREST + 1  # the far ones in front of all that are near, which stand the other way round
    discordant = NEAREST * (NEAREST - 1) / (num * (num - 1))
    assert far_and_near(far, near, [*far, *reversed(near)]) == pytest.approx(discordant)


@given(st.permutations(range(NEAREST)), st.integers(1, 40))
def test_a_long_context_costs_no_less_than_all_its_pieces_say(new: list[int], num_far: int) -> None:
    context, new = list(range(num_far)) + [1000 + i for i in range(NEAREST)], [1000 + i for i in new]
    inter = [1.0] * len(context)
    beta = prefix_overlap(context, np.array(inter), new)
    assert far_and_near(context[:num_far], context[num_far:], new) == pytest.approx(
        1.0 - adjusted_overlap(beta, order_penalty(context, new))
    )


@given(st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=20))
def test_the_same_context_costs_nothing_however_sums_are_rounded(inter: list[float]) -> None:
    context = list(range(len(inter)))
    assert unit_cfo(0.7, context, inter, context, first_places(context)) == 0.0
