"""Recommendation: the cheapest condition that surely holds the target, or why there is none. Pure numbers.

- `bounds_of` gives the two bounds of a mean over prompts, `judge` those of every condition, `recommend` the verdict.

Conditions are judged by their loss: how much less likely full prefill's own answer is with reused chunks, in nats per
token, as a mean over the prompts. A condition holds if the upper bound of this mean is not above the target. The bounds
are chosen so that the recommendation as a whole is wrong with a probability of at most 1 - CONFIDENCE:

    methods       share that probability evenly (Bonferroni)
    one method    is tested from its most expensive condition down, and ends at the first that does not hold, which
                  needs no correction (fixed sequence); cheaper conditions that would hold are taken for luck
    prompts       studentized bootstrap, because losses are skewed: most prompts lose nothing and a few a lot. A
                  percentile bootstrap promises far too much there (docs/verify.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from chunk_cache_tools.conditions import Condition

CONFIDENCE = 0.95
MIN_PROMPTS = 30
"""With fewer prompts nothing is recommended: what one prompt in ten does might then not be seen at all."""
MAX_ROWS = 0.9
"""Largest share of a full prefill's rows; a condition that computes more saves too little to be worth a risk."""
NUM_RESAMPLES = 4000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """What one condition did.

    Attributes:
        losses: `[num_prompts]` log-probability per token that full prefill's own answer lost, nats.
        kls: `[num_prompts]` KL of the first token's distribution from full prefill's, nats.
        gold_losses: as `losses`, for right answers; empty if none are known.
        same_first: share of prompts whose first token is the same as full prefill's.
        rows: computed rows, as a share of those that a full prefill behind the same exact prefix computes; a mean over
            the layers.
    """

    condition: Condition
    losses: Floats
    kls: Floats
    gold_losses: Floats
    same_first: float
    rows: float


@dataclass(frozen=True)
class Judged:
    """A condition with its mean loss and the bounds of this mean; `holds`: it and all more expensive conditions of the
    same method hold the target."""

    measured: Measured
    loss: float
    low: float
    high: float
    holds: bool
    holds_only_alone: bool
    """Whether it holds the target, but a more expensive condition of the same method does not."""


class Outcome(StrEnum):
    """What a user should do."""

    REUSE = "reuse"
    MORE_PROMPTS = "more prompts"
    NOT_HERE = "do not reuse here"


@dataclass(frozen=True)
class Verdict:
    """The recommendation.

    Attributes:
        chosen: the condition to serve with, if the outcome is to reuse.
        closest: the condition that comes closest, if none is chosen.
        num_more: estimated number of further prompts that would decide; None unless the outcome is `MORE_PROMPTS`.
    """

    outcome: Outcome
    chosen: Judged | None = None
    closest: Judged | None = None
    num_more: int | None = None


def bounds_of(values: Floats, level: float) -> tuple[float, float]:
    """Lower and upper bound of the mean, each missed with a probability of about `level`.

    If all values are equal, both bounds are that value, which does not prove that other prompts would have it. If too
    few values differ to say anything, a bound is infinite.
    """
    num = len(values)
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if num > 1 else 0.0
    if num < 2:
        return -math.inf, math.inf
    if spread == 0:
        return mean, mean
    rng = np.random.default_rng(0)
    drawn = values[rng.integers(0, num, (NUM_RESAMPLES, num))]
    offs = drawn.mean(axis=1) - mean
    spreads = drawn.std(axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample of equal values gets an infinite ratio
        ratios = np.where(offs == 0, 0.0, offs / (spreads / math.sqrt(num)))
    low, high = np.quantile(ratios, [1 - level, level], method="nearest")
    scale = spread / math.sqrt(num)
    return mean - float(low) * scale, mean - float(high) * scale


def judge(measured: Sequence[Measured], target: float) -> list[Judged]:
    """Judges all conditions; returns them in the order given."""
    families: dict[str, list[Measured]] = {}
    for one in measured:
        families.setdefault(family_of(one.condition), []).append(one)
    level = (1 - CONFIDENCE) / max(1, len(families))
    judged: dict[int, Judged] = {}
    for members in families.values():
        ended = False
        for one in sorted(members, key=lambda one: one.rows, reverse=True):
            low, high = bounds_of(one.losses, level)
            alone = high <= target
            ended = ended or not alone
            judged[id(one)] = Judged(one, float(one.losses.mean()), low, high, not ended, alone and ended)
    return [judged[id(one)] for one in measured]


def recommend(judged: Sequence[Judged], target: float) -> Verdict:
    """The verdict on at least one condition; all must have the same prompts."""
    assert judged, "nothing was measured"
    num = len(judged[0].measured.losses)
    worth = [one for one in judged if one.measured.rows <= MAX_ROWS]
    if not worth:
        return Verdict(Outcome.NOT_HERE, closest=min(judged, key=lambda one: one.measured.rows))
    holding = [one for one in worth if one.holds]
    if holding and num >= MIN_PROMPTS:
        return Verdict(Outcome.REUSE, chosen=min(holding, key=lambda one: (one.measured.rows, one.loss)))
    level = (1 - CONFIDENCE) / len({family_of(one.measured.condition) for one in judged})
    hopeful = [one for one in worth if one.loss < target and not one.holds_only_alone]
    if hopeful:
        wanted = [needed(one.measured.losses, target, level) for one in hopeful]
        fewest, _, closest = min(zip(wanted, (one.loss for one in hopeful), hopeful, strict=True), key=lambda t: t[:2])
        return Verdict(Outcome.MORE_PROMPTS, closest=closest, num_more=max(1, fewest - num))
    closest = min(worth, key=lambda one: one.loss)
    if num < MIN_PROMPTS:
        return Verdict(Outcome.MORE_PROMPTS, closest=closest, num_more=MIN_PROMPTS - num)
    return Verdict(Outcome.NOT_HERE, closest=closest)


def needed(losses: Floats, target: float, level: float) -> int:
    """Estimated number of prompts that would prove a mean below the target, if further prompts are like these.

    At least `MIN_PROMPTS`; if the present prompts do not prove it, at least half as many again.
    """
    num = len(losses)
    gap = target - float(losses.mean())
    assert gap > 0, "no number of prompts proves a mean that is not below the target"
    spread = float(losses.std(ddof=1)) if num > 1 else 0.0
    by_spread = math.ceil((NormalDist().inv_cdf(1 - level) * spread / gap) ** 2)
    enough = bounds_of(losses, level)[1] <= target
    return max(MIN_PROMPTS, by_spread, num if enough else math.ceil(1.5 * num))


def family_of(condition: Condition) -> str:
    """Name of a condition's family: conditions that differ only in their budget, the ratio, alpha or ends."""
    assert condition.method is not None, "the reference is not judged"
    budget = condition.method.budget
    others = sorted((name, value) for name, value in condition.method.options if name != budget)
    return f"{condition.method.method} by {budget or 'ratio'} {others}"
