"""Ablation: each budget by hand, and the two sweeps of the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark.simulate.ablation import BUDGETS, recomputed_shares
from benchmark.simulate.attention import SyntheticAttention
from benchmark.simulate.engine import Replay, simulate
from benchmark.simulate.settings import Settings
from benchmark.simulate.simulate import main
from benchmark.simulate.trace import Request, Trace

from chunk_cache.index.reusability import prefix_overlap

ROOMY = Settings(10**6)


def test_each_budget_by_hand() -> None:
    # 2 was computed behind 0 1. Behind 1 0 all of its context is there, in the other order; 1 stood behind 0, and now
    # behind nothing; 0 stood behind nothing, and now behind 1.
    trace = Trace("by hand", (Request((0, 1, 2), 1), Request((1, 0, 2), 1)), (100,) * 3, 4)
    keys = Replay(trace, ROOMY).keys
    attention = SyntheticAttention(0)
    second = attention.statistics(keys[1], 100, keys[:1], [100])
    third = attention.statistics(keys[2], 100, keys[:2], [100, 100])
    shares = recomputed_shares(trace, ROOMY, [1.0])
    assert shares["CFO"][0] == pytest.approx((second.cci + 1.0 + third.cci) / 3, abs=1e-6)
    assert shares["without S: one system prompt"] == shares["CFO"]
    assert shares["without gamma: any order is as good"][0] == pytest.approx((second.cci + 1.0) / 3, abs=1e-6)
    assert shares["without beta': CCI alone"] == pytest.approx(shares["CFO"])
    assert shares["without CCI: 1 - beta' alone"][0] == pytest.approx(1.0)
    assert prefix_overlap(keys[:2], third.inter, keys[1::-1]) == pytest.approx(1.0)


def test_the_whole_is_what_a_replay_computes_again() -> None:
    requests = tuple(Request(chunks, 1) for chunks in ((0, 1, 2), (3, 1, 0), (2, 3, 1), (4, 0, 1, 2)))
    trace = Trace("by hand", requests, (1000,) * 5, 4)
    expected = simulate(trace, ROOMY).tally().mean_fix_share
    assert recomputed_shares(trace, ROOMY, [1.0])["CFO"][0] == pytest.approx(expected, abs=1e-3)  # whole tokens there


def test_both_sweeps_write_their_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--set", "num_requests=40", "num_chunks=30", "chunk_len=50"]
    assert main(["ablate", *drawn, "--pool", "2000", "--alphas", "1", "--out", str(tmp_path)]) == 0
    assert all(f"| {name} |" in (tmp_path / "ablation.md").read_text() for name in BUDGETS)
    shapes = ["shapes", "--numbers", "2", "--lengths", "16", "32", "--requests", "30", "--out", str(tmp_path)]
    assert main(shapes) == 0
    assert "| chunks | of 16 tokens | of 32 tokens |" in (tmp_path / "shapes.md").read_text()
    assert main(["ablate", "--alphas", "-1"]) == 2
    assert "--alphas: -1 is not a number of at least 0" in capsys.readouterr().err
