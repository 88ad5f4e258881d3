"""Measures of runs that were made by hand, and a report that is complete and names what was missed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from benchmark.serving.client import Record, Run, record_of
from benchmark.serving.measures import share_right, summarize
from benchmark.serving.prompt import Prompt
from benchmark.serving.report import headline, targets, to_markdown
from benchmark.serving.sglang_tool import SharedScale

RUN: dict[str, Any] = {
    "command": "python x.py",
    "machine": {"cpu": "a CPU", "cores": 2, "ram_gib": 4, "accelerator": None, "load_1min": 0.1},
    "versions": {"python": "3.11", "commit": "0", "date": "today"},
}
TRACE = {
    "unit": "tokens",
    "num_prompts": 3,
    "num_chunks": 2,
    "chunks_per_prompt": [1, 2],
    "chunk_len_p5_p50_p95": [1, 2, 3],
    "mean_prompt_len": 4,
    "max_prompt_len": 5,
    "mean_output_len": 6.0,
}


def record(due_s: float, ttft_s: float, **values: Any) -> Record:
    first_s = due_s + ttft_s
    given = {"prompt_len": 100, "output_len": 5, "prefix_len": 10, "reused_len": 60, "recomputed_len": 9} | values
    return Record(due_s, first_s, first_s + 0.4, num_chunks=4, num_missed=1, **given)


def test_measures() -> None:
    ttfts = [0.1 * (i + 1) for i in range(20)]
    run = Run(tuple(record(float(i), ttft) for i, ttft in enumerate(ttfts)), 25.0, (5, 50, 20))
    found = summarize(run, bound_s=1.05)
    assert found["requests_per_s"] == pytest.approx(20 / 25)
    assert found["output_tokens_per_s"] == pytest.approx(100 / 25)
    for percent in (50, 90, 99):
        assert found[f"ttft_p{percent}_s"] == pytest.approx(np.percentile(ttfts, percent), abs=1e-4)
    assert found["tpot_p50_s"] == pytest.approx(0.1)
    assert found["e2e_p50_s"] == pytest.approx(np.percentile(ttfts, 50) + 0.4, abs=1e-4)
    assert found["mean_rows"] == 100 - 10 - 60 + 9
    assert (found["exact_share"], found["reused_share"], found["recomputed_share"]) == (0.1, 0.6, 0.09)
    assert found["missed_chunks"] == 0.25
    assert (found["slots_median"], found["slots_max"]) == (20, 50)
    assert found["goodput_per_s"] == pytest.approx(10 / 25)


def test_failures_are_counted_and_never_fast() -> None:
    run = Run((record(0.0, 0.5), Record(1.0, error="500: no"), Record(2.0, error="400: no")), 2.0, ())
    found = summarize(run, bound_s=10.0)
    assert (found["num_failed"], found["first_error"]) == (2, "500: no")
    assert found["ttft_p99_s"] == 0.5
    assert found["goodput_per_s"] == 0.5
    nothing = summarize(Run((Record(0.0, error="x"),), 1.0, ()), bound_s=1.0)
    assert nothing["ttft_p99_s"] is None
    assert nothing["exact_share"] is None


def test_events_become_records() -> None:
    meta = {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4, "finish_reason": {"type": "length"}}
    plain = record_of({"meta_info": meta}, 1.0, 1.5, 2.0)
    assert (plain.rows, plain.ttft_s, plain.e2e_s, plain.tpot_s) == (6, 0.5, 1.0, 0.5)
    chunks = [{"status": "hit"}, {"status": "miss"}, {"status": "prefix"}]
    cache = {"reused_tokens": 5, "recomputed_tokens": 2, "chunks": chunks}
    ours = record_of({"meta_info": {**meta, "chunk_cache": cache}, "text": "a"}, 1.0, 1.5, 2.0)
    assert (ours.rows, ours.num_chunks, ours.num_missed, ours.text) == (3, 3, 1, "a")
    aborted = {"type": "abort", "message": "out of memory"}
    assert record_of({"meta_info": {"finish_reason": aborted}}, 0, 1, 1).error == "aborted: out of memory"
    assert record_of({"error": {"message": "no"}}, 0, 1, 1).error is not None


def test_answers_are_compared_word_by_word() -> None:
    prompts = [Prompt("", (), "", 1, answer=answer) for answer in ("cup", "rome oslo", "red")]
    texts = (" cup", "rome  oslo", "red blue")
    records = [Record(0.0, text=text) for text in texts]
    assert share_right(prompts, records) == pytest.approx(2 / 3)
    assert share_right(prompts[:1], [Record(0.0, error="x", text="cup")]) == 0


def make_report(ours: float, loss: float) -> dict[str, Any]:
    def summary(system: str, phase: str, rate: float, ttft_s: float) -> dict[str, Any]:
        run = Run(tuple(record(i / rate, ttft_s) for i in range(6)), 6 / rate, (3,))
        return {"system": system, "phase": phase, "machine_gflops": 100.0, **summarize(run, 1.0)}

    systems = {"stock": 1.0, "reorder": 1.5, "epic@0.15": ours}
    points = {
        name: [{"rate": 0.3 * rate, "kept": True, **summary(name, "rate", 0.3 * rate, 1 / rate)}]
        for name, rate in systems.items()
    }
    spread = {"median": 1.0, "min": 0.9, "max": 1.1, "num": 8}
    fresh = {
        "system": "epic@0.15",
        "with_s": spread,
        "without_s": spread,
        "loss_percent": loss,
        "loss_95_percent_interval": [loss - 0.4, loss + 0.4],
        "target": 2.0,
    }
    report = {
        "plan": "standard",
        "serve": {
            "model": "a model",
            "pool_len": 1000,
            "trace": TRACE,
            "load": {"clients": 4, "warmup": 2, "closed": 6, "closed_runs": 3, "tries": 2, "bound_factor": 3.0},
            "bound_s": 1.0,
            "base_rate": 1.0,
            "highest_rate": dict(systems),
            "ended_early": [],
            "points": points,
            "runs": [summary(name, "closed", rate, 1 / rate) for name, rate in systems.items()],
        },
        "crowd": {
            "model": "a model",
            "pool_len": 1000,
            "clients": 48,
            "trace": TRACE,
            "rows": [summary(name, "crowd", rate, 1 / rate) for name, rate in systems.items()],
        },
        "fresh": {"rows": [fresh], "block_len": 4},
        "shared": {
            "model": "a model",
            "scale": asdict(SharedScale()),
            "rows": [fresh | {"kind": "chunk", "against": "plain"}],
            "runs": [shared_run(kind, pair) for pair in range(3) for kind in ("plain", "chunk")],
        },
        "trained": {
            "model": "qa",
            "trace": TRACE,
            "rows": [summary(name, "questions", rate, 0.1) | {"right": 0.5} for name, rate in systems.items()],
        },
        "orders": {
            "model": "a model",
            "trace": TRACE,
            "rows": [summary("epic@0.15", "orders", ours, 0.1) | {"block": block} for block in range(3)],
        },
    }
    return {name: value | {"run": RUN} if isinstance(value, dict) else value for name, value in report.items()}


def shared_run(kind: str, pair: int) -> dict[str, Any]:
    seconds = {"ttft_p50_s": 0.2, "ttft_p99_s": 0.5, "seconds": 9.0}
    found = {"requests_per_s": float(pair), "prompt_tokens": 100, "cached_tokens": 80, **seconds}
    return {"kind": kind, "pair": pair, "machine_gflops": 100.0, **found}


def test_targets_follow_the_numbers() -> None:
    assert all(row["met"] for row in targets(make_report(ours=4.0, loss=1.0)))
    missed = {row["what"] for row in targets(make_report(ours=2.0, loss=2.5)) if not row["met"]}
    assert "highest rate with p99 of TTFT within the bound, against stock" in missed
    assert "loss of epic@0.15 where no chunk is repeated" in missed
    assert "p99 of TTFT at the low rate, stock against ours" in missed


def test_a_target_that_the_numbers_leave_open_is_neither_met_nor_missed() -> None:
    report = make_report(ours=4.0, loss=1.8)
    found = {row["what"]: row for row in targets(report)}
    assert found["loss of epic@0.15 where no chunk is repeated"]["met"] is None
    report["serve"]["highest_rate"]["stock"] = None
    found = {row["what"]: row for row in targets(report)}
    assert found["highest rate with p99 of TTFT within the bound, against stock"]["met"] is None
    assert "not decided" in "\n".join(to_markdown(report))


def test_a_system_that_reached_nothing_has_missed_its_target() -> None:
    report = make_report(ours=4.0, loss=1.0)
    report["serve"]["highest_rate"]["epic@0.15"] = None
    report["serve"]["points"]["epic@0.15"][0]["num_failed"] = 1
    missed = [row["what"] for row in targets(report) if row["met"] is False]
    assert missed == [
        "highest rate with p99 of TTFT within the bound, against stock",
        "the same against reordering",
        "p99 of TTFT at the low rate, stock against ours",
    ]


def test_a_report_without_stock_and_with_a_system_that_failed() -> None:
    report = make_report(ours=4.0, loss=1.0)
    part = report["serve"]
    failed = summarize(Run((Record(0.0, error="x"),), 1.0, ()), 1.0)
    part["runs"] = [part["runs"][2] | failed]
    part["highest_rate"] = {"epic@0.15": None}
    part["points"] = {"epic@0.15": [part["points"]["epic@0.15"][0] | failed | {"kept": False}]}
    part["ended_early"] = ["epic@0.15"]
    report["trained"]["rows"] = [report["trained"]["rows"][2] | failed]
    text = "\n".join(to_markdown(report))
    assert "| `epic@0.15` | 0.00 |  |  |  |  |  |" in text
    assert "ended for want of prompts" in text


def test_report() -> None:
    report = make_report(ours=4.0, loss=1.0)
    text = "\n".join(to_markdown(report))
    for part in (
        "## Targets",
        "## Under load",
        "## A crowd",
        "## No repeated chunk",
        "## Quality beside speed",
        "## Ever new orders",
    ):
        assert part in text
    assert "| 13-18 | `epic@0.15` | 4.00 | 0.100 | 0.100 | 39 of 100 | 10 % | 60 % | 75 % |" in text
    assert "| `epic@0.15` | 4.00 | 4.0x |" in "\n".join(headline(report))
    assert "| with `--chunk-cache` | 1.500 (1.000-2.000) | 0.200" in text, "the first pair does not count"
    assert "A run takes +1.0 % [+0.6, +1.4] longer with `--chunk-cache`." in text
