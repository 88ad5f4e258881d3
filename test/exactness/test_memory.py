"""Activations are bounded by the budget of a step, however long the prompt is: measured, beside stock SGLang."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from exactness.runner import Config, run_cases

pytestmark = pytest.mark.slow

BUDGET = 256
SHORT, LONG = (2_000, 6_000), (6_000, 25_000)
LONG_S = 1200
"""SGLang's attention on a CPU takes time with the square of a prompt in each step: 3 minutes for 25,000 tokens."""


@cache
def measured(method: str | None, lens: tuple[int, ...], step_len: int = BUDGET) -> dict[int, Any]:
    """By length of the prompt; method None = stock SGLang."""
    config = Config(
        chunked=True,
        step_len=step_len,
        max_position=1 << 17,
        max_total_tokens=max(lens) + 2048,
        server=(("max_running_requests", 4), ("max_prefill_tokens", step_len)),
    )
    names = [f"{method or 'epic'} {length}" for length in lens]
    module = "exactness.memory_cases"
    found = run_cases(config, is_ours=method is not None, names=names, module=module, within_s=LONG_S - 60)
    assert not any(isinstance(one, str) for one in found.values()), found
    return {length: found[name] for length, name in zip(lens, names, strict=True)}


def growth(found: dict[int, Any]) -> float:
    """Bytes of the peak per token by which a prompt is longer."""
    short, *_, long = sorted(found)
    return (found[long]["peak"] - found[short]["peak"]) / (long - short)


@pytest.mark.parametrize(
    ("method", "lens"),
    [
        (method, SHORT)
        if lens is SHORT
        else pytest.param(method, lens, marks=[pytest.mark.all, pytest.mark.timeout(LONG_S)])
        for lens in (SHORT, LONG)
        for method in ("epic", "cacheblend")
    ],
)
def test_a_late_hit_takes_no_more_memory_than_stock(method: str, lens: tuple[int, ...]) -> None:
    """On a CPU attention copies the K and V of a prompt, ours as stock's: that much grows with it."""
    found, stock = measured(method, lens), measured(None, SHORT)
    for length, one in found.items():
        assert one["most_rows"] == BUDGET, length
        assert one["num_forwards"] >= length // BUDGET, length
        assert one["info"]["reused_tokens"] > 0, one
        # One that begins with all rows of the load too: the text in front of the chunk is none of them.
        assert (one["info"]["method"], one["info"]["fallback_reason"]) == (method, None)
    short = min(stock)
    for length, one in found.items():
        assert one["peak"] <= round(stock[short]["peak"] + growth(stock) * (length - short)), (found, stock)


def test_the_budget_decides() -> None:
    """The same prompt in one step takes several times as much."""
    length = max(SHORT)
    in_steps, at_once = measured("epic", SHORT)[length], measured("epic", (length,), step_len=8192)[length]
    assert at_once["num_forwards"] == 1
    assert 3 * in_steps["peak"] < at_once["peak"]
