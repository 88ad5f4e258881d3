"""The search for the highest rate, against systems whose capacity is known."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark.serving.sweep import NothingLeft, keeps_bound, sweep
from hypothesis import given
from hypothesis import strategies as st

RATES = [0.3, 0.7, 1.0, 1.5, 2.2, 3.2]


def system(capacity: float, asked: list[float]) -> Any:
    """Within the bound of one second up to its capacity."""

    def measure(rate: float, number: int) -> dict[str, Any]:
        asked.append(rate)
        return {"ttft_p99_s": 0.5 if rate <= capacity else 2.0, "num_failed": 0}

    return measure


@given(st.floats(0.3, 40.0), st.integers(0, 5))
def test_finds_the_highest_rate_between_its_neighbours(capacity: float, refinements: int) -> None:
    asked: list[float] = []
    found = sweep(system(capacity, asked), RATES, 1.0, refinements=refinements, most=40)
    assert found.highest is not None
    assert found.highest <= capacity
    broken = min(point["rate"] for point in found.points if not point["kept"])
    assert capacity < broken
    # The gap between two given rates, at most 0.7 / 0.3, halves in logarithms with each refinement.
    assert broken / found.highest <= (0.7 / 0.3) ** (0.5**refinements) + 1e-9
    assert [point["rate"] for point in found.points] == asked


def test_the_first_rate_is_too_much() -> None:
    asked: list[float] = []
    found = sweep(system(0.1, asked), RATES, 1.0, refinements=3)
    assert found.highest is None
    assert asked == [0.3, 0.3]


def test_ends_where_nothing_saturates() -> None:
    asked: list[float] = []
    found = sweep(system(1e9, asked), RATES, 1.0, most=9)
    assert len(found.points) == 9
    assert found.highest == asked[-1] > 3.2
    assert not found.is_complete


def test_a_bound_that_is_broken_once_is_not_broken() -> None:
    slow = {(1.0, 0), (2.2, 0), (2.2, 1)}

    def measure(rate: float, number: int) -> dict[str, Any]:
        return {"ttft_p99_s": 2.0 if (rate, number) in slow else 0.5, "num_failed": 0}

    found = sweep(measure, RATES, 1.0, refinements=0)
    assert [(point["rate"], point["kept"]) for point in found.points] == [
        (0.3, True),
        (0.7, True),
        (1.0, False),
        (1.0, True),
        (1.5, True),
        (2.2, False),
        (2.2, False),
    ]
    assert (found.highest, found.is_complete) == (1.5, True)


def test_ends_where_nothing_is_left_to_measure_with() -> None:
    def measure(rate: float, number: int) -> dict[str, Any]:
        if rate > 1.0:
            raise NothingLeft
        return {"ttft_p99_s": 0.5, "num_failed": 0}

    found = sweep(measure, RATES, 1.0)
    assert (found.highest, found.is_complete, len(found.points)) == (1.0, False, 3)


@pytest.mark.parametrize(
    ("summary", "kept"),
    [
        ({"ttft_p99_s": 1.0, "num_failed": 0}, True),
        ({"ttft_p99_s": 1.01, "num_failed": 0}, False),
        ({"ttft_p99_s": 0.1, "num_failed": 1}, False),
        ({"ttft_p99_s": None, "num_failed": 4}, False),
    ],
)
def test_a_failed_request_breaks_the_bound(summary: dict[str, Any], kept: bool) -> None:
    assert keeps_bound(summary, 1.0) is kept
