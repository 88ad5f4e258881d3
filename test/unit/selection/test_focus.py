"""Focused chunks against a transcription of Cache-Craft's algorithm 1 in exact fractions and 60 decimal digits."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_chunk_cache.forward.selection.focus import FocusTracker, focused_chunks

# Small integers: many ties among the masses, their differences and their entropies.
FEW = st.lists(st.integers(0, 6), min_size=1, max_size=8).map(lambda values: [float(v) for v in values])
# Masses as a forward gives them, in steps of 2^-16, so that differences are exact but hardly ever equal.
MASSES = st.lists(st.integers(0, 2**20).map(lambda v: v / 2**16), min_size=1, max_size=20)


def minus_p_log_p(p: Fraction) -> Decimal:
    """-p log p, and 0 where p is 0."""
    if p == 0:
        return Decimal(0)
    value = Decimal(p.numerator) / Decimal(p.denominator)
    return -value * value.ln()


def algorithm_1(mass: Sequence[float]) -> set[int]:
    """Lines 4 to 9 for the accumulated masses of one layer, with what METHODS decides where the paper is silent."""
    k = len(mass)
    order = sorted(range(k), key=lambda i: (-mass[i], i))
    c = [Fraction(mass[i]) for i in order]
    diff = [c[i] - c[i + 1] for i in range(k - 1)]
    if k <= 2 or sum(diff) == 0:
        return set(range(k))
    p = [d / sum(diff) for d in diff]
    with localcontext() as context:
        context.prec = 60
        h = [sum((minus_p_log_p(p[j]) for j in range(i + 1)), Decimal(0)) for i in range(k - 1)]
        gain = [h[i + 1] - h[i] for i in range(k - 2)]
        best = next(i for i in range(k - 2) if max(gain) - gain[i] < Decimal("1e-40"))
    return set(order[: best + 2])  # gain[i] is what step i + 1 adds, which lies behind chunk i + 2, counted from 1


def focused(mass: Sequence[float]) -> set[int]:
    found = focused_chunks(torch.tensor(mass, dtype=torch.float32))
    assert (found.dtype, found.shape) == (torch.bool, (len(mass),))
    return set(found.nonzero().flatten().tolist())


@given(FEW)
def test_equals_algorithm_1_with_many_ties(mass: list[float]) -> None:
    assert focused(mass) == algorithm_1(mass)


@given(MASSES)
def test_equals_algorithm_1(mass: list[float]) -> None:
    assert focused(mass) == algorithm_1(mass)


@pytest.mark.parametrize(
    ("mass", "expected"),
    [
        ([3.0], {0}),
        ([0.0], {0}),
        ([3.0, 1.0], {0, 1}),
        ([5.0, 5.0, 5.0], {0, 1, 2}),
        ([0.0, 0.0, 0.0, 0.0], {0, 1, 2, 3}),
        ([10.0, 9.5, 1.0, 0.9, 0.8], {0, 1}),  # p = 0.054, 0.924, 0.011, 0.011: h grows by 0.073, 0.049, 0.049
        ([1.0, 9.0, 2.0], {1, 2}),
        ([16.0, 14.0, 1.0, 0.0], {0, 1, 2}),  # p = 2/16, 13/16, 1/16: h grows by 0.169, 0.173
        ([10.0, 9.0, 8.0, 4.0, 3.0], {0, 1, 2}),  # p = 1/7, 1/7, 4/7, 1/7: h grows by 0.278, 0.320, 0.278
        ([3.0, 8.0, 4.0, 10.0, 9.0], {1, 3, 4}),
        ([10.0, 9.0, 8.0, 4.0, 0.0], {0, 1, 2}),  # p = 0.1, 0.1, 0.4, 0.4: the last two are equal, the first wins
        ([4.0, 3.0, 1.0, 0.0], {0, 1}),  # p = 1/4, 1/2, 1/4, and -p log p is the same for 1/2 and 1/4
    ],
)
def test_by_hand(mass: list[float], expected: set[int]) -> None:
    assert algorithm_1(mass) == expected
    assert focused(mass) == expected


@pytest.mark.parametrize("num_chunks", range(3, 30))
def test_equal_steps_are_a_tie_that_the_first_wins(num_chunks: int) -> None:
    mass = [float(num_chunks - i) for i in range(num_chunks)]
    assert algorithm_1(mass) == {0, 1}
    assert focused(mass) == {0, 1}


@given(FEW | MASSES)
def test_focused_chunks_are_the_largest(mass: list[float]) -> None:
    inside = focused(mass)
    outside = set(range(len(mass))) - inside
    assert inside
    assert all(mass[i] >= mass[j] for i in inside for j in outside)


# Layer by layer.


def settle(layers: Sequence[Sequence[float]], window: int) -> tuple[int, set[int]] | None:
    """Line 11: the first layer, counted from 0, at which the set has been the same for `window` layers."""
    total = [0.0] * len(layers[0])
    found: list[set[int]] = []
    for layer, mass in enumerate(layers):
        total = [a + b for a, b in zip(total, mass, strict=True)]
        found.append(algorithm_1(total))
        last = found[-window:]
        if len(last) == window and all(one == last[0] for one in last):
            return layer, found[-1]
    return None


def track(layers: Sequence[Sequence[float]], window: int) -> tuple[int, set[int]] | None:
    """The same, by the tracker."""
    tracker = FocusTracker(len(layers[0]), window, torch.device("cpu"))
    for layer, mass in enumerate(layers):
        answer = tracker.update(torch.tensor(mass, dtype=torch.float32))
        if answer is None:
            assert layer + 1 < window
            continue
        settled, is_focused = answer
        assert (settled.dtype, settled.shape) == (torch.bool, ())
        if settled:
            return layer, set(is_focused.nonzero().flatten().tolist())
    return None


@st.composite
def layers_of_masses(draw: st.DrawFn) -> list[list[float]]:
    """[num_layers][num_chunks], in steps of 1/4 so that sums in fp32 are exact."""
    num_chunks = draw(st.integers(1, 6))
    quarters = st.integers(0, 40).map(lambda value: value / 4)
    one_layer = st.lists(quarters, min_size=num_chunks, max_size=num_chunks)
    return draw(st.lists(one_layer, min_size=1, max_size=14))


@given(layers_of_masses(), st.integers(1, 5))
def test_tracker_equals_the_transcription(layers: list[list[float]], window: int) -> None:
    assert track(layers, window) == settle(layers, window)


def test_one_to_two_chunks_settle_as_early_as_may_be_with_all_of_them() -> None:
    assert track([[1.0]] * 6, 3) == (2, {0})
    assert track([[1.0, 5.0]] * 6, 3) == (2, {0, 1})


def test_masses_are_added_up_and_a_set_that_changes_starts_anew() -> None:
    first = [10.0, 9.0, 8.0, 4.0, 3.0]
    other = [0.0, 0.0, 50.0, 0.0, 0.0]
    assert track([first] * 4, 3) == (2, {0, 1, 2})
    changed = [first, first, other, *[[0.0] * 5] * 5]  # from layer 2 on the sums are 20, 18, 66, 8, 6
    assert algorithm_1([20.0, 18.0, 66.0, 8.0, 6.0]) == {0, 1, 2}
    assert settle(changed, 3) == track(changed, 3) == (2, {0, 1, 2})


def test_fewer_layers_than_the_window_never_settle() -> None:
    assert track([[3.0, 2.0, 0.0]] * 2, 3) is None
