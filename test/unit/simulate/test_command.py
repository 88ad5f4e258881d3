"""The command: from a trace to CSV and page; a user's mistake is one line and exit code 2."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmark.simulate.simulate import main


def test_a_users_trace_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "requests.jsonl"
    assert main(["trace", "--set", "num_requests=40", "num_chunks=30", "chunk_len=50", "--out", str(trace)]) == 0
    command = ["run", "--jsonl", str(trace), "--pool", "600", "1200", "--policies", "lru", "frequency-reuse"]
    assert main([*command, "--out", str(tmp_path), "--name", "mine"]) == 0
    with (tmp_path / "mine.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["pool_tokens"]) for row in rows] == [
        ("lru", "600"),
        ("frequency-reuse", "600"),
        ("lru", "1200"),
        ("frequency-reuse", "1200"),
    ]
    assert all(0 < float(row["computed_share"]) <= 1 for row in rows)
    page = (tmp_path / "mine.md").read_text()
    assert "- command: `" in page
    assert "| frequency-reuse |" in page
    assert "| lru |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "--trace", "zip"], "--trace: unknown trace 'zip'; known: zipf"),
        (["run", "--set", "num_chunk=3"], "--set num_chunk=3: unknown name 'num_chunk'; known: num_requests"),
        (["run", "--set", "num_chunks=x"], "--set num_chunks=x: 'x' is not of type int; give one"),
        (["run", "--policies", "arc"], "--policies: unknown policy 'arc'; known: lru"),
        (["run", "--set", "num_requests=5", "--pool", "100"], "--pool: 100 tokens do not hold the longest prompt"),
        (["crowd", "--set", "num_requests=40", "--clients", "20"], "clients: 40 requests are too few for 20 clients; "),
        (["crowd", "--rates", "0"], "--rates: 0 is not a rate above 0; give requests a second"),
        (["run", "--jsonl", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["run", "--pool-share", "nan"], "--pool-share: nan is not a share above 0; give one"),
        (["run", "--pool-share", "0.1", "inf"], "--pool-share: inf is not a share above 0; give one"),
        (["run", "--pool-share", "1e308"], "--pool-share: 1e+308 is not a share above 0; give one"),
        (["run", "--pool-share", "9", "--max-cfo", "nan"], "max_cfo: nan is not a number of at least 0; give one"),
        (["run", "--pool-share", "9", "--max-generation", "-1"], "max_generation: -1 is too small; give at least 0"),
        (["run", "--out", __file__], "--out: cannot make "),
    ],
)
def test_a_mistake_is_one_line(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
