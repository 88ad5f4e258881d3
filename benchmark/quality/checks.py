"""Checks of the implementation on the synthetic families: `check_rows`.

They check whether the code does what it says, never whether one method is better than another: the order of methods is
not stable between two equally good models of this size (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.quality.conditions import FULL_REUSE, NO_SHIFT
from benchmark.quality.table import MASTERED, Row

from chunk_cache_tools.conditions import REFERENCE

# Families that the full prefill must answer, or the checks below mean nothing; the page only marks other families.
REQUIRED = ("needle", "multi", "carry")
COLLAPSED = 0.6  # highest score that counts as collapsed; guesses among four candidates reach 0.25
RECOVERED = 0.2  # least rise of a score that counts as recovered; two standard errors of n = 100 are 0.1
MAX_KL_AT_ONE = 1e-4  # nats; allows for rounding in fp32
RECOVERY_RATIO = 0.5


@dataclass(frozen=True)
class Check:
    """One statement about one model, whether it holds, and the numbers that decide it."""

    model: str
    statement: str
    holds: bool
    numbers: str


def check_rows(rows: Iterable[Row]) -> list[Check]:
    """All checks that have the rows they need."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    return [check for model_rows in models.values() for check in _check_model(model_rows)]


def _check_model(rows: Sequence[Row]) -> list[Check]:
    return [*_mastered(rows), *_ratio_one(rows), *_shift(rows), *_carry(rows)]


def _mastered(rows: Sequence[Row]) -> list[Check]:
    found = (_find(rows, family, REFERENCE.label, None) for family in REQUIRED)
    return [
        Check(
            row.model,
            f"full prefill answers at least {MASTERED:.0%} of `{row.family}` right",
            row.mastered,
            f"{row.score_all:.1%}",
        )
        for row in found
        if row is not None
    ]


def _ratio_one(rows: Sequence[Row]) -> list[Check]:
    at_one = [row for row in rows if row.ratio == 1.0]
    if not at_one:
        return []
    worst = min(at_one, key=lambda row: row.text_same)
    furthest = max(at_one, key=lambda row: row.kl or 0.0)
    kl = furthest.kl or 0.0
    return [
        Check(
            worst.model,
            "ratio 1.0 gives the answers of a full prefill, for every method and family",
            worst.text_same == 1.0 and kl <= MAX_KL_AT_ONE,
            f"same answers {worst.text_same:.1%} ({worst.method}, {worst.family}); "
            f"largest mean KL {kl:.1e} ({furthest.method}, {furthest.family})",
        )
    ]


def _shift(rows: Sequence[Row]) -> list[Check]:
    without = _find(rows, "multi", NO_SHIFT.label, 0.0)
    shifted = _find(rows, "multi", FULL_REUSE.label, 0.0)
    if without is None or shifted is None:
        return []
    low, high = _score(without), _score(shifted)
    return [
        Check(
            without.model,
            "`multi` collapses without the position shift and recovers with it",
            low <= COLLAPSED and high >= low + RECOVERED,
            f"{low:.1%} without, {high:.1%} with",
        )
    ]


def _carry(rows: Sequence[Row]) -> list[Check]:
    reused = _find(rows, "carry", FULL_REUSE.label, 0.0)
    curve = sorted(
        (row for row in rows if row.family == "carry" and row.method == "random" and row.ratio is not None),
        key=lambda row: row.ratio or 0.0,
    )
    half = next((row for row in curve if row.ratio == RECOVERY_RATIO), None)
    if reused is None or half is None:
        return []
    low, high = _score(reused), _score(half)
    points = ", ".join(f"{_score(row):.0%} at {row.ratio:g}" for row in curve)
    return [
        Check(
            reused.model,
            "`carry` collapses with full reuse and recovers as `random` recomputes more",
            low <= COLLAPSED and high >= low + RECOVERED,
            f"{low:.1%} with full reuse; random: {points}",
        )
    ]


def _find(rows: Iterable[Row], family: str, method: str, ratio: float | None) -> Row | None:
    return next((row for row in rows if (row.family, row.method, row.ratio) == (family, method, ratio)), None)


def _score(row: Row) -> float:
    return 0.0 if row.score is None else row.score
