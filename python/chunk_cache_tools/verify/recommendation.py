"""Recommendation: the cheapest condition that surely holds the target, or why there is none. Pure numbers.

- `bounds_of` gives the two bounds of a mean over prompts, `judge` those of every condition, `recommend` the verdict.

What is judged is the loss: how much less likely full prefill's own answer is with reused chunks, nats per token, mean
over the prompts. A condition holds where the upper bound of that mean is not above the target. The bounds are built so
that the recommendation as a whole is wrong with a probability of at most 1 - CONFIDENCE:

    methods       share that probability evenly (Bonferroni)
    one method    is tested from its most expensive condition down, and ends at the first that does not hold, which
                  needs no correction (fixed sequence); what would hold below it has been lucky
    prompts       the studentized bootstrap, because losses are skewed: most prompts lose nothing and a few a lot. A
                  percentile bootstrap promises far too much there (docs/verify.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from chunk_cache_tools.conditions import Condition

CONFIDENCE = 0.95
MIN_PROMPTS = 30
"""With fewer nothing is recommended: whatever one prompt in ten does is then easily never seen."""
MAX_ROWS = 0.9
"""Largest share of a full prefill's rows; a condition that computes more saves nothing that is worth a risk."""
NUM_RESAMPLES = 4000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """What one condition did.

    Attributes:
        losses: `[num_prompts]` log-probability per token that full prefill's own answer lost, nats.
        kls: `[num_prompts]` of the first token's distribution to full prefill's, nats.
        gold_losses: as `losses`, of right answers; empty where none are known.
        same_first: share of prompts whose first token is full prefill's.
        rows: rows that are computed, as a share of what a full prefill behind the same exact prefix computes; a mean
            over the layers.
    """

    condition: Condition
    losses: Floats
    kls: Floats
    gold_losses: Floats
    same_first: float
    rows: float


@dataclass(frozen=True)
class Judged:
    """A condition with its mean loss, the bounds of it, and whether it holds the target, together with all that cost
    more of the same method."""

    measured: Measured
    loss: float
    low: float
    high: float
    holds: bool
    holds_only_alone: bool
    """Whether it would hold alone."""


class Outcome(StrEnum):
    """What a user should do."""

    REUSE = "reuse"
    MORE_PROMPTS = "more prompts"
    NOT_HERE = "do not reuse here"


@dataclass(frozen=True)
class Verdict:
    """The recommendation.

    Attributes:
        chosen: the condition to serve with, where the outcome is to reuse.
        closest: where nothing is chosen, the condition that comes closest.
        num_more: prompts that would decide, estimated; None where no number of them would change the outcome, or it is
            decided.
    """

    outcome: Outcome
    chosen: Judged | None = None
    closest: Judged | None = None
    num_more: int | None = None


def bounds_of(values: Floats, level: float, seed: int = 0) -> tuple[float, float]:
    """Lower and upper bound of the mean, each missed with a probability of about `level`.

    Values that are all the same are their own bounds, which does not prove that others would be. Where too few differ
    to say anything, a bound is infinite.
    """
    num = len(values)
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if num > 1 else 0.0
    if num < 2:
        return -math.inf, math.inf
    if spread == 0:
        return mean, mean
    rng = np.random.default_rng(seed)
    drawn = values[rng.integers(0, num, (NUM_RESAMPLES, num))]
    offs = drawn.mean(axis=1) - mean
    spreads = drawn.std(axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal values in a resample: as far off as can be
        ratios = np.where(offs == 0, 0.0, offs / (spreads / math.sqrt(num)))
    low, high = np.quantile(ratios, [1 - level, level], method="nearest")
    scale = spread / math.sqrt(num)
    return mean - float(low) * scale, mean - float(high) * scale


def judge(measured: Sequence[Measured], target: float, confidence: float = CONFIDENCE) -> list[Judged]:
    """All conditions in the order given."""
    families: dict[str, list[Measured]] = {}
    for one in measured:
        families.setdefault(family_of(one.condition), []).append(one)
    level = (1 - confidence) / max(1, len(families))
    judged: dict[int, Judged] = {}
    for members in families.values():
        ended = False
        for one in sorted(members, key=lambda one: one.rows, reverse=True):
            low, high = bounds_of(one.losses, level)
            alone = high <= target
            ended = ended or not alone
            judged[id(one)] = Judged(one, float(one.losses.mean()), low, high, not ended, alone and ended)
    return [judged[id(one)] for one in measured]


def recommend(judged: Sequence[Judged], target: float, confidence: float = CONFIDENCE) -> Verdict:
    """The verdict; there is at least one condition, and all have the same prompts."""
    assert judged, "nothing was measured"
    num = len(judged[0].measured.losses)
    worth = [one for one in judged if one.measured.rows <= MAX_ROWS]
    if not worth:
        return Verdict(Outcome.NOT_HERE, closest=min(judged, key=lambda one: one.measured.rows))
    holding = [one for one in worth if one.holds]
    if holding and num >= MIN_PROMPTS:
        return Verdict(Outcome.REUSE, chosen=min(holding, key=lambda one: (one.measured.rows, one.loss)))
    level = (1 - confidence) / len({family_of(one.measured.condition) for one in judged})
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
    """Prompts with which a mean below the target would be known to be, if more of them are like these.

    At least `MIN_PROMPTS`, and more than there are, since these did not suffice.
    """
    num = len(losses)
    gap = target - float(losses.mean())
    assert gap > 0, "no number of prompts proves a mean that is not below the target"
    spread = float(losses.std(ddof=1)) if num > 1 else 0.0
    by_spread = math.ceil((NormalDist().inv_cdf(1 - level) * spread / gap) ** 2)
    enough = bounds_of(losses, level)[1] <= target
    return max(MIN_PROMPTS, by_spread, num if enough else math.ceil(1.5 * num))


def family_of(condition: Condition) -> str:
    """Conditions of one family differ in their budget only: a method by ratio, or by alpha."""
    assert condition.method is not None, "the reference is not judged"
    options: Mapping[str, object] = dict(condition.method.options)
    by = "alpha" if condition.method.alpha else "ratio"
    others = sorted((name, value) for name, value in options.items() if name != "alpha")
    return f"{condition.method.method} by {by} {others}"
