"""Sweep: ever higher rates until a system is saturated, then the highest rate that keeps the bound, more precisely.

`sweep` only decides which rate comes next; what a rate gives is told by a function, so the search is tested without a
server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Measure = Callable[[float], dict[str, Any]]  # rate -> summary of the run
GROWTH = 1.6  # beyond the given rates


@dataclass(frozen=True)
class Sweep:
    """Points in the order of measuring; `highest` is the highest rate whose run kept the bound, None if none did."""

    points: tuple[dict[str, Any], ...]
    highest: float | None


def sweep(measure: Measure, rates: Sequence[float], bound_s: float, *, refinements: int = 1, most: int = 16) -> Sweep:
    """Measures `rates` in ascending order up to the first that breaks the bound, and then in between.

    Args:
        rates: requests a second, ascending; where all of them keep the bound, higher ones follow.
        bound_s: of the p99 of the time to first token.
        refinements: bisections, in logarithms, between the last rate that kept the bound and the first that did not.
        most: points in all.
    """
    assert rates, "no rate to measure"
    assert list(rates) == sorted(rates), "rates in ascending order"
    points: list[dict[str, Any]] = []

    def keeps(rate: float) -> bool:
        summary = measure(rate)
        kept = keeps_bound(summary, bound_s)
        points.append({"rate": rate, "kept": kept, **summary})
        return kept

    low, high = None, None
    waiting = list(rates)
    while high is None and len(points) < most:
        rate = waiting.pop(0) if waiting else points[-1]["rate"] * GROWTH
        if keeps(rate):
            low = rate
        else:
            high = rate
    for _ in range(refinements):
        if low is None or high is None or len(points) >= most:
            break
        middle = math.sqrt(low * high)
        if keeps(middle):
            low = middle
        else:
            high = middle
    return Sweep(tuple(points), low)


def keeps_bound(summary: dict[str, Any], bound_s: float) -> bool:
    """Whether the p99 of the time to first token is within the bound, and nothing failed."""
    p99 = summary["ttft_p99_s"]
    return summary["num_failed"] == 0 and p99 is not None and p99 <= bound_s
