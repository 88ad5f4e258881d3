"""The kernel benchmarks run to the end on small shapes; what they measure is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[3] / "benchmark" / "kernel"
SMALL = {
    "forward": ["--num-layers", "2", "--hidden", "64", "--kv-heads", "4", "--mlp", "128", "--tokens", "128"],
    "sparse_extend": ["--kv-len", "128", "--shares", "0.15", "1"],
}


def run(op: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"bench_{op}.py"), "--skip-tests", "--repeat", "1", "--threads", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("op", SMALL)
def test_writes_a_table_with_its_floor(op: str, tmp_path: Path) -> None:
    done = run(op, *SMALL[op], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / f"{op}.json").read_text())
    assert report["gigabytes_per_s"] > 0
    assert report["gigaflops"] > 0
    for row in report["results"]:
        assert row["floor"] > 0
        assert row[op] >= row["best"] > 0
    assert (tmp_path / f"{op}.md").read_text().count("\n| --- |") == 1


def test_every_benchmark_is_tested() -> None:
    assert {path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py")} == set(SMALL)
