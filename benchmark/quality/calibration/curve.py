"""Curve: what each value of the grid keeps of the full prefill's score, and the smallest that keeps enough.

- `point_of` measures one value over all prompts; `share_interval` is its 95 % interval, from resampling the prompts.
- `choose` picks the smallest value from which on every larger one of the grid keeps enough too.

A share is the mean score divided by the full prefill's on the same prompts. Comparisons are paired: a resample takes a
prompt's two scores together, and keeps the number of prompts of each family. All prompts count, also those that the
full prefill answers wrong: what is to be kept is the score that users get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
_TOLERANCE = 1e-9  # of shares: 0.95 of 140 prompts is 133 of them, also after rounding

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """Replies to the prompts of one family under one condition.

    Attributes:
        scores: `[num_prompts]`, from 0 to 1.
        kls: `[num_prompts]` nats to the full prefill; empty for the full prefill itself.
        reused_len, recomputed_len: tokens of all prompts together.
    """

    scores: Floats
    kls: Floats
    reused_len: int
    recomputed_len: int


@dataclass(frozen=True)
class Point:
    """What one value of the grid does.

    Attributes:
        score: mean over all prompts.
        share: `score` / the full prefill's; `low` and `high` its 95 % interval.
        recomputed: recomputed tokens / reused tokens; None where nothing was reused.
        kl: mean KL of the first token's distribution to the full prefill's, nats.
        families: the share of each family alone; None where its full prefill scores 0.
    """

    value: float
    score: float
    share: float
    low: float
    high: float
    recomputed: float | None
    kl: float
    families: Mapping[str, float | None]


@dataclass(frozen=True)
class Choice:
    """What the curve says about a wanted share.

    Attributes:
        value: the smallest that suffices together with all larger ones; None where there is none.
        sure: as `value`, but the lower ends of the intervals suffice.
        passed_over: smaller points that suffice although a larger one does not.
        dips: neighbours of which the larger value keeps less.
    """

    value: float | None
    sure: float | None
    passed_over: tuple[Point, ...]
    dips: tuple[tuple[Point, Point], ...]


def point_of(value: float, full: Mapping[str, Answers], answers: Mapping[str, Answers]) -> Point:
    """The point of one value; both mappings are by family, with the same prompts in the same order.

    The full prefill must score above 0.
    """
    pairs = [(full[family].scores, mine.scores) for family, mine in answers.items()]
    score, full_score = mean_score(answers), mean_score(full)
    assert full_score > 0, "no share of a score of 0"
    low, high = share_interval([a for a, _ in pairs], [b for _, b in pairs])
    reused_len = sum(mine.reused_len for mine in answers.values())
    return Point(
        value=value,
        score=score,
        share=score / full_score,
        low=low,
        high=high,
        recomputed=sum(mine.recomputed_len for mine in answers.values()) / reused_len if reused_len else None,
        kl=float(np.concatenate([mine.kls for mine in answers.values()]).mean()),
        families={family: _share(full[family].scores, mine.scores) for family, mine in answers.items()},
    )


def mean_score(answers: Mapping[str, Answers]) -> float:
    """Mean over the prompts of all families, each prompt counting the same."""
    return float(np.concatenate([mine.scores for mine in answers.values()]).mean())


def share_interval(full: Sequence[Floats], scores: Sequence[Floats], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap of sum(scores) / sum(full).

    Where all prompts agree it is that share twice, which does not prove that others would.

    Args:
        full, scores: per family `[num_prompts]`, of the same prompts.
    """
    rng = np.random.default_rng(seed)
    full_sum, score_sum = np.zeros(NUM_RESAMPLES), np.zeros(NUM_RESAMPLES)
    for wanted, got in zip(full, scores, strict=True):
        assert len(wanted) == len(got), f"{len(wanted)} and {len(got)} prompts"
        # How often each prompt is drawn: as good as the drawn indices, and a matrix product instead of a gather.
        times = rng.multinomial(len(got), np.full(len(got), 1 / len(got)), size=NUM_RESAMPLES)
        full_sum += times @ wanted
        score_sum += times @ got
    known = full_sum > 0  # a resample in which the full prefill is always wrong has no share
    ends = np.quantile(score_sum[known] / full_sum[known], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(ends[0]), float(ends[1])


def choose(points: Sequence[Point], keep: float) -> Choice:
    """The choice for a wanted share; `points` ascend and are not empty.

    A value that suffices by chance, below one that does not, is no choice: the next validation set would say otherwise.
    """
    assert points, "a curve without points"
    assert all(a.value < b.value for a, b in pairwise(points)), "values must ascend"
    enough = [suffices(point, keep) for point in points]
    start = _first_of_tail(enough)
    return Choice(
        value=points[start].value if start < len(points) else None,
        sure=next((p.value for p in points[_first_of_tail([is_sure(p, keep) for p in points]) :]), None),
        passed_over=tuple(point for point, fits in zip(points[:start], enough, strict=False) if fits),
        dips=tuple((a, b) for a, b in pairwise(points) if b.share < a.share - _TOLERANCE),
    )


def suffices(point: Point, keep: float) -> bool:
    """Whether the measured share is at least `keep`."""
    return point.share >= keep - _TOLERANCE


def is_sure(point: Point, keep: float) -> bool:
    """Whether even the lower end of the interval is at least `keep`."""
    return point.low >= keep - _TOLERANCE


def _first_of_tail(enough: Sequence[bool]) -> int:
    """Where the run of True at the end begins; the length where there is none."""
    start = len(enough)
    while start > 0 and enough[start - 1]:
        start -= 1
    return start


def _share(full: Floats, scores: Floats) -> float | None:
    return float(scores.sum() / full.sum()) if full.sum() > 0 else None
