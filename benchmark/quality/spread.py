"""Spread: joins the rows of several models.

`curves_of` returns one curve per method of a family.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmark.quality.table import Row

from chunk_cache.methods import METHODS
from chunk_cache_tools.conditions import parse_method


@dataclass(frozen=True)
class Point:
    """Mean, smallest and largest value over the models."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Point | None:
        """The point of the values; None if no model has one."""
        known = [value for value in values if value is not None]
        return cls(statistics.fmean(known), min(known), max(known)) if known else None


@dataclass(frozen=True)
class MethodCurve:
    """One method over its ratios, ascending; the lists have one entry per ratio.

    Attributes:
        scores, diffs: over the models; None if no prompt of any model was scored. `low` and `high` of a difference to
            full prefill are the outermost ends of the models' intervals.
        right_diffs: likewise on the prompts that full prefill answers with a full score.
        gold_losses, own_losses: losses of likelihood, with intervals like `diffs`.
        gold_mores, own_mores: `gold_losses` and `own_losses` minus those of the server's default, question by question.
        kls, shares: over the models; a share is recomputed tokens / reused tokens.
    """

    label: str
    ratios: list[float]
    scores: list[Point | None] = field(default_factory=list)
    diffs: list[Point | None] = field(default_factory=list)
    right_diffs: list[Point | None] = field(default_factory=list)
    kls: list[Point | None] = field(default_factory=list)
    shares: list[Point | None] = field(default_factory=list)
    gold_losses: list[Point | None] = field(default_factory=list)
    own_losses: list[Point | None] = field(default_factory=list)
    gold_mores: list[Point | None] = field(default_factory=list)
    own_mores: list[Point | None] = field(default_factory=list)

    @property
    def is_composed(self) -> bool:
        """Whether grouping or early termination is on."""
        return parse_method(self.label).is_composed


def curves_of(rows: Iterable[Row], family: str) -> list[MethodCurve]:
    """Curves in the order of the registry; a method with options follows the method without."""
    mine = [row for row in rows if row.family == family and row.ratio is not None]
    labels = sorted({row.method for row in mine}, key=_rank)
    return [_curve(label, [row for row in mine if row.method == label]) for label in labels]


def _curve(label: str, rows: Sequence[Row]) -> MethodCurve:
    ratios = sorted({row.ratio for row in rows if row.ratio is not None})
    curve = MethodCurve(label, ratios)
    for ratio in ratios:
        cell = [row for row in rows if row.ratio == ratio]
        curve.scores.append(Point.of(row.score for row in cell))
        curve.kls.append(Point.of(row.kl for row in cell))
        curve.shares.append(Point.of(row.recomputed for row in cell))
        for points, name in (
            (curve.diffs, "diff"),
            (curve.right_diffs, "right_diff"),
            (curve.gold_losses, "gold_loss"),
            (curve.own_losses, "own_loss"),
            (curve.gold_mores, "gold_more"),
            (curve.own_mores, "own_more"),
        ):
            points.append(_difference(cell, name))
    return curve


def _difference(cell: Sequence[Row], name: str) -> Point | None:
    mean, low, high = (Point.of(getattr(row, name + end) for row in cell) for end in ("", "_low", "_high"))
    return Point(mean.mean, low.low, high.high) if mean and low and high else mean


def _rank(label: str) -> tuple[int, str]:
    name = label.partition(":")[0]
    return (list(METHODS).index(name) if name in METHODS else len(METHODS), label)
