"""Many requests at once: the books of the pool hold, and what waits, waits for the reason it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.simulate.crowd import Crowd, Load
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.simulate import main
from benchmark.simulate.trace import Trace, TraceSpec, generate


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(TraceSpec(num_requests=120, num_chunks=60, chunk_len=100))


def test_alone_nobody_waits_and_each_request_holds_its_prompt(trace: Trace) -> None:
    found = Crowd(trace, Settings(10**6, alpha=None), Load(num_clients=1)).run()
    assert (found["waiting"], found["no room"], found["kept room"], found["retractions"]) == (0, 0, 0, 0)
    assert found["running"] == pytest.approx(1.0)
    assert 500 < found["pool tokens each"] < 1100
    assert found["hit rate"] > 0.8


@pytest.mark.parametrize("reuse", [True, False])
def test_who_is_retracted_gives_all_back_and_goes_on_with_what_it_generated(trace: Trace, reuse: bool) -> None:
    crowd = Crowd(trace, Settings(4_000, alpha=None, reuse=reuse), Load(num_clients=16))
    found = crowd.run()
    assert found["running"] < 8
    assert found["no room"] + found["kept room"] > 0.5
    assert (found["kept room"] > 0) == reuse
    crowd.replay.check_integrity()
    crowd.waiting.clear()
    while crowd.running:
        crowd._retract()
    assert (crowd.pool.num_reserved, crowd.pool.num_locked) == (0, 0)
    job = crowd.waiting[0]
    num_out = job.num_out
    assert num_out > 0
    assert crowd._prefill()
    assert job.running is not None
    assert job.running.plan.prompt_len == job.layout.length + num_out
    crowd.replay.check_integrity()


def test_room_for_reused_chunks_is_kept_by_letting_others_wait(trace: Trace) -> None:
    settings = Settings(4_000, alpha=None)
    some, none = (Crowd(trace, replace(settings, keep_share=share), Load(num_clients=16)).run() for share in (0.5, 0.0))
    assert (some["kept room"] > 0.5, none["kept room"]) == (True, 0)
    assert some["running"] < none["running"]
    assert some["hit rate"] > none["hit rate"]


def test_requests_come_at_their_rate_whatever_runs(trace: Trace) -> None:
    """Few find an idle server; too many find one that serves what it can."""
    few, many = (Crowd(trace, Settings(10**6, alpha=None), Load(per_s=rate)).run() for rate in (0.5, 200.0))
    assert few["requests/s"] == pytest.approx(0.5, rel=0.3)
    assert (few["waiting"] < 0.05, few["running"] < 1) == (True, True)
    assert many["requests/s"] < 150
    assert many["TTFT p99"] > 3 * few["TTFT p99"]


def test_a_pool_that_is_too_small_is_refused(trace: Trace) -> None:
    with pytest.raises(SettingsError, match="pool: 700 tokens do not hold"):
        Crowd(trace, Settings(700), Load(num_clients=2))


def test_the_command(tmp_path: Path) -> None:
    command = ["crowd", "--set", "num_requests=30", "num_chunks=20", "chunk_len=50", "--pool", "2000", "--clients", "2"]
    command += ["--rates", "4"]
    assert main([*command, "--keep-shares", "0.1", "0", "--seeds", "1", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "crowd.md").read_text()
    assert "| 2,000 | 2 clients | keep_share 0.1 |" in page
    assert "| 2,000 | 4/s | keep_share 0.1 |" in page
