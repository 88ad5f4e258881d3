"""The recommendation on curves made by hand: what is chosen, what is not, and how many prompts are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from chunk_cache_tools.conditions import Condition, MethodSpec, parse_method
from chunk_cache_tools.verify.recommendation import (
    MIN_PROMPTS,
    Floats,
    Measured,
    Outcome,
    Verdict,
    bounds_of,
    family_of,
    judge,
    needed,
    recommend,
)

TARGET = 0.05


def losses_of(mean: float, spread: float = 0.01, num: int = 100) -> Floats:
    """Losses with exactly this mean, spread evenly around it."""
    return mean + spread * np.linspace(-1, 1, num)


def measured(ratio: float, losses: Floats, method: str = "epic", rows: float | None = None) -> Measured:
    spec = parse_method(method)
    condition = Condition(spec, None if spec.budget else ratio)
    return Measured(condition, losses, losses, np.empty(0), 1.0, 0.1 + ratio if rows is None else rows)


def verdict_of(points: Sequence[Measured], target: float = TARGET) -> Verdict:
    return recommend(judge(points, target), target)


def test_the_cheapest_that_holds_is_chosen() -> None:
    points = [
        measured(0.05, losses_of(0.3)),
        measured(0.3, losses_of(0.02)),
        measured(0.5, losses_of(0.01)),
        measured(0.15, losses_of(0.03), "fusionrag"),
        measured(0.5, losses_of(0.01), "fusionrag"),
    ]
    verdict = verdict_of(points)
    assert verdict.outcome is Outcome.REUSE
    assert verdict.chosen is not None
    assert verdict.chosen.measured is points[3]
    assert verdict.chosen.low < 0.03 < verdict.chosen.high < TARGET


def test_the_upper_bound_decides_and_not_the_mean() -> None:
    """Half of the prompts lose nothing: the mean is below the target, and nobody knows by how much."""
    losses = np.repeat([0.0, 0.09], 25)
    (one,) = judge([measured(0.3, losses)], TARGET)
    assert one.loss == pytest.approx(0.045)
    assert (one.holds, one.high > TARGET) == (False, True)
    verdict = recommend([one], TARGET)
    assert verdict.outcome is Outcome.MORE_PROMPTS
    assert verdict.closest is one
    assert verdict.num_more is not None
    more = np.tile(losses, math.ceil((50 + verdict.num_more) / 50) * 2)
    assert verdict_of([measured(0.3, more)]).outcome is Outcome.REUSE


def test_a_smaller_ratio_that_holds_by_luck_is_passed_over() -> None:
    points = [measured(0.15, losses_of(0.01)), measured(0.3, losses_of(0.2)), measured(0.5, losses_of(0.01))]
    judged = judge(points, TARGET)
    assert [(one.holds, one.holds_only_alone) for one in judged] == [(False, True), (False, False), (True, False)]
    chosen = recommend(judged, TARGET).chosen
    assert chosen is not None
    assert chosen.measured is points[2]
    assert recommend(judged[:2], TARGET).outcome is Outcome.NOT_HERE


def test_where_everything_costs_too_much_nothing_is_recommended() -> None:
    points = [measured(ratio, losses_of(0.5 - ratio / 2)) for ratio in (0.05, 0.15, 0.5)]
    verdict = verdict_of(points)
    assert (verdict.outcome, verdict.chosen, verdict.num_more) == (Outcome.NOT_HERE, None, None)
    assert verdict.closest is not None
    assert verdict.closest.measured is points[2]


def test_what_saves_next_to_nothing_is_not_recommended() -> None:
    verdict = verdict_of([measured(0.9, losses_of(0.0), rows=0.95)])
    assert verdict.outcome is Outcome.NOT_HERE
    assert verdict.closest is not None


@pytest.mark.parametrize("mean", [0.0, 0.4])
def test_few_prompts_decide_nothing(mean: float) -> None:
    verdict = verdict_of([measured(0.3, losses_of(mean, 0.001, num=4))])
    assert verdict.outcome is Outcome.MORE_PROMPTS
    assert verdict.num_more == MIN_PROMPTS - 4


def test_the_number_of_missing_prompts_grows_as_the_gap_closes() -> None:
    wide, narrow = (needed(losses_of(mean, 0.5, num=50), TARGET, 0.0125) for mean in (0.0, 0.04))
    assert 75 < wide < narrow
    assert needed(losses_of(0.0, 0.001, num=50), TARGET, 0.0125) == 50


def test_more_methods_make_each_bound_wider() -> None:
    losses = np.random.default_rng(0).exponential(0.02, 200)
    alone = judge([measured(0.3, losses)], TARGET)[0]
    beside = judge([measured(0.3, losses), measured(0.3, losses, "fusionrag")], TARGET)[0]
    assert beside.high > alone.high > alone.loss
    ratios = judge([measured(ratio, losses) for ratio in (0.05, 0.15, 0.3)], TARGET)
    assert ratios[0].high == alone.high, "ratios of one method need no correction"


def test_alphas_are_a_family_of_their_own() -> None:
    by_alpha = [Condition(MethodSpec("cache-craft", (("alpha", alpha),))) for alpha in (0.5, 2.0)]
    by_ratio = Condition(MethodSpec("cache-craft"), 0.3)
    options = Condition(parse_method("cache-craft:group_size=8"), 0.3)
    assert family_of(by_alpha[0]) == family_of(by_alpha[1])
    assert len({family_of(by_alpha[0]), family_of(by_ratio), family_of(options)}) == 3


# Bounds.


def test_bounds_of_equal_values_are_the_value() -> None:
    assert bounds_of(np.full(40, 0.25), 0.05) == (0.25, 0.25)
    assert bounds_of(np.array([0.25]), 0.05) == (-math.inf, math.inf)


def test_bounds_are_those_of_a_normal_sample() -> None:
    values = np.random.default_rng(1).normal(0.0, 1.0, 400)
    low, high = bounds_of(values, 0.025)
    assert high - values.mean() == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert values.mean() - low == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_one_bad_prompt_among_many_leaves_the_mean_open() -> None:
    """A resample without it has no spread at all, so nothing can be said about how often it comes."""
    assert bounds_of(np.array([3.0] + [0.0] * 49), 0.05)[1] == math.inf


def test_bounds_hold_what_they_promise_where_a_few_prompts_lose_a_lot() -> None:
    """A tenth of the prompts loses about a nat: the mean is above a 5 % bound in about 5 % of the samples.

    It is far more often above that of the usual percentile bootstrap.
    """
    draw = np.random.default_rng(2)
    samples = [draw.exponential(1.0, 100) * (draw.random(100) < 0.1) for _ in range(200)]
    missed = sum(bounds_of(sample, 0.05)[1] < 0.1 for sample in samples)
    usual = sum(np.quantile(draw.choice(sample, (1000, 100)).mean(axis=1), 0.95) < 0.1 for sample in samples)
    assert missed <= 15 < usual
