"""When requests arrive: `poisson` at a rate, `recorded` from a log's column of timestamps."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.quality.question import DataError, read_jsonl

UNITS = {"s": 1.0, "ms": 1e-3}


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Times in seconds of `num` arrivals with exponential gaps; the first comes after a gap, the last at `num / rate`.

    The gaps are scaled to this sum, so that the offered rate is exact even with few requests. Each rate has its own
    sample: the same rate and seed always give the same times.
    """
    times = np.cumsum(np.random.default_rng((seed, round(1e6 * rate))).exponential(1.0, num))
    return (times * (num / rate / times[-1])).tolist()


def recorded(path: str | Path, column: str, unit: str = "s", speed: float = 1.0) -> list[float]:
    """Arrivals of a recorded log in ascending order, the first one at 0.

    Args:
        path: a CSV with a header (BurstGPT: `Timestamp`, seconds) or JSONL (Mooncake: `timestamp`, milliseconds).
        column: name of the column, or field, of the timestamps.
        unit: unit of the timestamps, `s` or `ms`.
        speed: 2 replays twice as fast.

    Raises:
        DataError: the file cannot be read, has no such column, or holds something that is not a number.
    """
    path = Path(path)
    if unit not in UNITS:
        raise DataError(f"unit {unit!r} of timestamps: give one of {', '.join(UNITS)}.")
    if not 0 < speed < math.inf:
        raise DataError(f"--speed {speed:g}: give a number above 0.")
    times = []
    for where, row in _rows(path):
        if column not in row:
            raise DataError(f"{where}: no column {column!r}; there are {', '.join(map(str, row))}.")
        try:
            time = float(row[column])
        except (TypeError, ValueError):
            time = math.nan
        if not math.isfinite(time):
            raise DataError(f"{where}: {row[column]!r} is no timestamp; give {unit} as a number.")
        times.append(time)
    if not times:
        raise DataError(f"{path}: no line with a timestamp in it.")
    times.sort()
    return [(time - times[0]) * UNITS[unit] / speed for time in times]


def _rows(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """(`file:line`, row) for every line."""
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give the path of a CSV or JSONL file.") from error
    return ((f"{path}:{number}", row) for number, row in enumerate(csv.DictReader(lines), 2))
