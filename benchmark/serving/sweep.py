"""Sweep: raises the rate until a system breaks the bound, then bisects to find the highest rate that keeps it.

`sweep` only decides which rate comes next; a function measures the rate, so the search is tested without a server. A
rate that breaks the bound is measured again before it counts as too high: the p99 of a few dozen requests is nearly
the slowest of them, so a machine that is slow for one second can break the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Measure = Callable[[float, int], dict[str, Any]]  # rate, number of the try from 0 -> summary of the run
GROWTH = 1.6  # factor from rate to rate above the given ones


class NothingLeft(Exception):
    """Raised by the function that measures when it has no prompts left; the sweep ends there."""


@dataclass(frozen=True)
class Sweep:
    """Points in the order of measuring; `highest` is the highest rate with a run that kept the bound, or None.

    `is_complete` is False if the sweep ended before a rate broke the bound, or before the gap was bisected.
    """

    points: tuple[dict[str, Any], ...]
    highest: float | None
    is_complete: bool = True


def sweep(
    measure: Measure,
    rates: Sequence[float],
    bound_s: float,
    *,
    refinements: int = 1,
    tries: int = 2,
    most: int = 16,
) -> Sweep:
    """Measures `rates` in ascending order up to the first that breaks the bound, and then in between.

    Args:
        rates: requests a second, ascending; if all of them keep the bound, higher ones follow.
        bound_s: bound of the p99 of the time to first token.
        refinements: bisections, in logarithms, between the last rate that kept the bound and the first that did not.
        tries: runs that must break the bound before a rate counts as too high.
        most: most rates in all.
    """
    assert rates, "no rate to measure"
    assert list(rates) == sorted(rates), "rates in ascending order"
    points: list[dict[str, Any]] = []
    low: float | None = None
    high: float | None = None

    def look_at(rate: float) -> None:
        nonlocal low, high
        for number in range(tries):
            summary = measure(rate, number)
            kept = keeps_bound(summary, bound_s)
            points.append({"rate": rate, "kept": kept, **summary})
            if kept:
                low = rate
                return
        high = rate

    def num_rates() -> int:
        return len({point["rate"] for point in points})

    waiting = list(rates)
    try:
        while high is None and num_rates() < most:
            look_at(waiting.pop(0) if waiting else points[-1]["rate"] * GROWTH)
        for _ in range(refinements):
            if low is None or high is None or num_rates() >= most:
                break
            look_at(math.sqrt(low * high))
    except NothingLeft:
        return Sweep(tuple(points), low, is_complete=False)
    return Sweep(tuple(points), low, is_complete=high is not None)


def keeps_bound(summary: dict[str, Any], bound_s: float) -> bool:
    """Whether the p99 of the time to first token is within the bound, and nothing failed."""
    p99 = summary["ttft_p99_s"]
    return summary["num_failed"] == 0 and p99 is not None and p99 <= bound_s
