"""What `bench_serving.py` refuses before it starts anything: the message names the flag and the remedy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from benchmark.serving import bench_serving
from benchmark.serving.bench_serving import parse_args


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", *arguments])
    return parse_args()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "serve,serve"), "--parts: name each part once"),
        (("--parts", "rates"), "--parts: rates is not one of"),
        (("--parts", "fresh", "--systems", "stock,epic@0.3"), "of part serve"),
        (("--systems", "epic@0.15"), "name stock first, or give --bound-s and --base-rate"),
        (("--systems", "stock,epic@2"), "not in"),
        (("--bound-s", "nan"), "--bound-s: nan; give a number above 0"),
        (("--base-rate", "0"), "--base-rate: 0; give a number above 0"),
        (("--speed", "2"), "--speed: there are no recorded arrivals"),
        (("--timestamps", "a.csv:Time:s", "--speed", "0"), "--speed: 0; give a number above 0"),
        (("--timestamps", "a.csv"), "--timestamps: give FILE:COLUMN:UNIT"),
        (("--plan", "ragpulse"), "--ragpulse: part pulse needs the folder of RAGPulse"),
        (("--ragpulse", "folder"), "--ragpulse: part pulse needs the folder of RAGPulse, and no other part reads it"),
        (("--pool", "0"), "--pool: 0; give the tokens"),
        (("--seed", "-1"), "--seed: -1; give a whole number"),
        (("--name", "a/b"), "--name: 'a/b' is no name of a file"),
        (("--log", "a.jsonl"), "--log, --model: give both or none"),
        (("--trace", "chunks=3"), "--trace: 'chunks=3'; give KEY=VALUE with a key of num_requests"),
        (("--trace", "chunk_len"), "--trace: 'chunk_len'; give KEY=VALUE"),
        (("--trace", "chunk_len=long"), "--trace: chunk_len=long: give a whole number"),
        (("--trace", "zipf=nan"), "--trace: zipf=nan: give a number from 0"),
        (("--trace", "new_share=2"), "--trace: new_share: 2.0 is not in"),
        (("--trace", "num_chunks=3"), "--trace: chunks_per_request: 15 of a corpus that begins with 3"),
        (("--load", "clients=0"), "--load: clients=0 is too small"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(monkeypatch, *arguments)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_trace_and_the_load_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(
        monkeypatch, "--trace", "session_len=4, session_share=0.5,order=sorted", "--load", "clients=8,bound_factor=2"
    )
    assert (args.plan.spec.session_len, args.plan.spec.session_share) == (4.0, 0.5)
    assert (args.plan.spec.order, args.plan.load.clients, args.plan.load.bound_factor) == ("sorted", 8, 2.0)
    assert args.plan.load.warmup == bench_serving.PLANS["standard"].load.warmup


def test_results_that_cannot_be_read_are_not_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "standard.json").write_text("{")
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "--add", "--out", str(tmp_path)])
    assert bench_serving.main() == 1
    assert (tmp_path / "standard.json").read_text() == "{"
