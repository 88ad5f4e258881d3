"""Arrivals: the distribution of gaps, recorded logs and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmark.quality.question import DataError
from benchmark.serving.arrivals import poisson, recorded
from scipy import stats


def test_gaps_are_exponential() -> None:
    times = poisson(4000, 2.5, seed=1)
    gaps = np.diff([0.0, *times])
    assert gaps.min() > 0
    assert stats.kstest(gaps, "expon", args=(0, 1 / 2.5)).pvalue > 0.01
    assert times == poisson(4000, 2.5, seed=1)
    assert times != poisson(4000, 2.5, seed=2)


@pytest.mark.parametrize("num", [1, 15, 80])
def test_few_arrivals_come_at_the_rate_too(num: int) -> None:
    times = poisson(num, 0.3, seed=0)
    assert len(times) == num
    assert times[-1] == pytest.approx(num / 0.3)
    shape = np.array(poisson(num, 0.6, seed=0)) / times[-1]
    assert num == 1 or not np.allclose(shape, np.array(times) / times[-1] / 2)  # a sample of its own


def test_csv_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Model\n7.5,a\n5,b\n6,c\n")
    assert recorded(path, "Timestamp") == [0.0, 1.0, 2.5]
    assert recorded(path, "Timestamp", speed=2) == [0.0, 0.5, 1.25]


def test_jsonl_of_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 1000, "hash_ids": []}\n\n{"timestamp": 3500}\n')
    assert recorded(path, "timestamp", "ms") == [0.0, 2.5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "Time\n1\n", r"a.csv:2: no column 'Timestamp'; there are Time"),
        ("a.csv", "Timestamp\nsoon\n", r"a.csv:2: 'soon' is no timestamp"),
        ("a.csv", "Timestamp\nnan\n", r"a.csv:2: 'nan' is no timestamp"),
        ("a.csv", "Timestamp\n", r"no line with a timestamp"),
        ("a.jsonl", "{", r"a.jsonl:1: not JSON"),
        ("a.jsonl", "[1]", r"a.jsonl:1: not an object"),
    ],
)
def test_broken_logs_name_line_and_remedy(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        recorded(path, "Timestamp")


def test_a_missing_file_a_strange_unit_a_strange_speed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        recorded(tmp_path / "none.csv", "Timestamp")
    with pytest.raises(DataError, match="unit 'h'"):
        recorded(tmp_path / "none.csv", "Timestamp", "h")
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="--speed"):
            recorded(tmp_path / "none.csv", "Timestamp", speed=speed)
