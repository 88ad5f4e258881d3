"""Two ways to do the same, measured in pairs: `loss_of_pairs`, and `loss_cells`, its cells for a table."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import Any

from benchmark.common.results import Spread

LOSS_HEADER = ("loss", "95 % interval", "target")


def loss_of_pairs(pairs: list[tuple[float, float]], target: float) -> dict[str, Any]:
    """How much longer "with" takes than "without", in percent: the median over pairs of seconds (with, without)."""
    losses = [100 * (with_s / without_s - 1) for with_s, without_s in pairs]
    low, high = _bootstrap_median(losses)
    loss = statistics.median(losses)
    return {
        "with_s": Spread.of([pair[0] for pair in pairs]).as_dict(),
        "without_s": Spread.of([pair[1] for pair in pairs]).as_dict(),
        "loss_percent": round(loss, 2),
        "loss_95_percent_interval": [round(low, 2), round(high, 2)],
        "target": target,
        "met": loss <= target,
        "samples_s": [[round(value, 5) for value in pair] for pair in pairs],
    }


def loss_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Seconds with and without, and the columns of `LOSS_HEADER`."""
    return (
        Spread(**row["with_s"]).text(3),
        Spread(**row["without_s"]).text(3),
        f"{row['loss_percent']:+.1f} %",
        "{:+.1f} to {:+.1f} %".format(*row["loss_95_percent_interval"]),
        f"{row['target']:g} %",
    )


def _bootstrap_median(values: list[float], rounds: int = 4000) -> tuple[float, float]:
    """The middle 95 % of medians of resampled `values`: how far noise alone moves the median."""
    draw = random.Random(2)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[rounds // 40], medians[-rounds // 40 - 1]
