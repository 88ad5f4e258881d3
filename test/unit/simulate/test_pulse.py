"""RAGPulse in the simulator: the trace, the exact systems beside ours by hand, and the figures of the real one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.common.ragpulse import RagPulse, read_ragpulse
from benchmark.simulate.baselines import as_sets, by_frequency, rebuilt, reordered, single_copies
from benchmark.simulate.engine import simulate
from benchmark.simulate.pulse import trace_of_pulse
from benchmark.simulate.pulse_report import WEEK_HITS, pulse_report
from benchmark.simulate.settings import Settings
from benchmark.simulate.simulate import main
from benchmark.simulate.trace import Request, Trace

from chunk_cache.options.config import Config
from pulse_files import write_pulse

ROOMY = Settings(10**6, alpha=None)
REAL = os.environ.get("RAGPULSE")


@pytest.fixture
def pulse(tmp_path: Path) -> RagPulse:
    return read_ragpulse(write_pulse(tmp_path))


def trace_of(*requests: Request, num: int = 10, length: int = 10) -> Trace:
    return Trace("by hand", requests, (length,) * num, 0)


def found(trace: Trace) -> list[int]:
    """Tokens of each prompt that a prefix cache without a bound finds."""
    return [tally.prefix_tokens for tally in simulate(trace, Settings(10**6, reuse=False)).windows(1)]


def test_blocks_stand_as_the_trace_says(pulse: RagPulse) -> None:
    trace = trace_of_pulse(pulse)
    second = trace.requests[1]
    lengths = [(trace.lengths[number], is_chunk) for number, is_chunk in second.blocks]
    assert lengths == [(20, False), (10, False), (40, True), (30, True), (5, False), (7, False)]
    assert second.question_len == 4 + 8
    assert trace.prompt_len(second) == pulse.prompt_len(pulse.requests[1])
    assert second.chunks == trace.requests[0].chunks[::-1]  # equal ids, equal numbers
    assert trace.requests[2].chunks[0] == trace.requests[2].chunks[2]


def test_what_is_unique_of_a_system_prompt_can_stand_behind(pulse: RagPulse) -> None:
    lengths = [
        [trace.lengths[number] for number, _ in trace.requests[0].blocks]
        for trace in (trace_of_pulse(pulse, num_behind) for num_behind in range(4))
    ]
    assert lengths == [[20, 10, 30, 40], [20, 30, 40, 10], [30, 40, 20, 10], [30, 40, 20, 10]]


def test_history_can_be_marked(pulse: RagPulse) -> None:
    assert len(trace_of_pulse(pulse, marks_all=True).requests[1].chunks) == 4


def test_blocks_are_read_back() -> None:
    request = Request((1, 2), 5, 3, plain=((0, 7), (0, 8), (1, 9), (2, 6)))
    assert request.blocks == ((7, False), (8, False), (1, True), (9, False), (2, True), (6, False))
    assert Request.of_blocks(request.blocks, 5, 3) == request


def test_a_prefix_is_found_block_by_block(pulse: RagPulse) -> None:
    # The first block of the system prompt is the same, the second is not.
    assert found(trace_of_pulse(pulse)) == [0, 20, 20]


def test_a_store_of_chunks_holds_nothing_else(pulse: RagPulse) -> None:
    outcome = simulate(trace_of_pulse(pulse), replace(ROOMY, holds="chunks"), check_every=1)
    tallies = outcome.windows(1)
    assert [tally.prefix_tokens for tally in tallies] == [0, 0, 0]
    assert [tally.reused_tokens for tally in tallies] == [0, 70, 30]
    assert outcome.end_stored == 30 + 40 + 50
    # 90 tokens hold 0 and 1; 2 comes in for the least recently used, 1, and 0 is still there.
    small = simulate(trace_of_pulse(pulse), replace(ROOMY, holds="chunks", pool_tokens=90), check_every=1)
    assert [tally.reused_tokens for tally in small.windows(1)] == [0, 70, 30]
    assert small.end_stored == 80
    assert single_copies(trace_of_pulse(pulse), 90) == (70 + 30 + 50) / (70 + 70 + 130)


def test_another_system_prompt_is_charged(pulse: RagPulse) -> None:
    settings = Settings(10**6)
    charged, free = (
        simulate(trace_of_pulse(pulse), replace(settings, counts_system=counts)).windows(1)[1].recomputed_tokens
        for counts in (True, False)
    )
    assert charged > free
    same = trace_of(*(Request((1, 2), 5, plain=((0, 0),)) for _ in range(2)))
    with_and_without = [
        simulate(same, replace(settings, counts_system=counts)).tally().recomputed_tokens for counts in (True, False)
    ]
    assert with_and_without[0] == with_and_without[1]


def test_reorder_follows_orders_behind_the_same_head() -> None:
    trace = trace_of(
        Request((1, 2), 1, plain=((0, 7),)), Request((2, 1), 1, plain=((0, 7),)), Request((2, 1), 1, plain=((0, 8),))
    )
    sent = reordered(trace, 10**6)
    assert [request.chunks for request in sent.requests[:2]] == [(1, 2), (1, 2)]
    assert found(sent) == [0, 30, 0]


def test_frequency_is_known_in_advance() -> None:
    trace = trace_of(Request((1, 2, 1), 1), Request((3, 2), 1), Request((2, 4), 1))
    assert [request.chunks for request in by_frequency(trace, 0).requests] == [(2, 1), (2, 3), (2, 4)]


def test_rebuilt_moves_what_is_not_marked_too() -> None:
    trace = trace_of(
        Request((1, 2), 1, plain=((0, 0), (2, 5))),
        Request((2, 3), 1, plain=((0, 6), (0, 0), (2, 5))),  # 0 can begin it; 1 is not there
        Request((2, 1), 1, plain=((0, 0),)),  # 0 1 2 can
    )
    sent = rebuilt(trace, 10**6)
    orders = [[number for number, _ in request.blocks] for request in sent.requests]
    assert orders == [[0, 1, 2, 5], [0, 6, 2, 3, 5], [0, 1, 2]]
    assert found(sent) == [0, 10, 30]


def test_set_cache_finds_the_same_beginning_in_any_order() -> None:
    trace = trace_of(Request((1, 2, 3), 1), Request((2, 1, 4), 1), Request((3, 1), 1), Request((4, 2, 1), 1))
    # {1, 2} as 1 2; {3, 1} and {3} began nothing; {4, 2, 1} did, as 1 2 4.
    assert [request.chunks for request in as_sets(trace, 0).requests] == [(1, 2, 3), (1, 2, 4), (3, 1), (1, 2, 4)]
    assert found(as_sets(trace, 0)) == [0, 20, 0, 30]


def test_the_page_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pulse(tmp_path)
    assert main(["ragpulse", str(tmp_path), "--sizes", "400", "800", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "ragpulse.md").read_text()
    assert "trace.jsonl: sha256 `" in page
    assert "| set-cache |" in page
    assert main(["run", "--ragpulse", str(tmp_path), "--pool", "500", "--policies", "lru", "--out", str(tmp_path)]) == 0
    assert "trace.jsonl: sha256 `" in (tmp_path / "run.md").read_text()
    assert main(["ragpulse", str(tmp_path / "nowhere")]) == 2
    assert "1_sys_prompt.jsonl: cannot be read" in capsys.readouterr().err


def test_a_page_of_a_few_requests_has_every_table(pulse: RagPulse) -> None:
    report = pulse_report(pulse, (400,))
    assert [line for line in report.text if line.startswith("## ")] == [
        "## Hits of a store of passages",
        "## A KV pool",
        "## Against exact systems",
        "## What is remembered",
    ]


@pytest.mark.skipif(REAL is None, reason="RAGPULSE names no folder; the trace is not in this project")
@pytest.mark.parametrize("size", WEEK_HITS)
def test_the_real_trace_gives_the_figures_of_its_week(size: int) -> None:
    assert REAL is not None
    trace = trace_of_pulse(read_ragpulse(Path(REAL)))
    assert len(trace.requests) == 4000
    settings = Settings(size, holds="chunks", alpha=None)
    lru = simulate(trace, settings).tally().chunk_token_hit_rate
    default = Config()
    served = replace(settings, policy=default.eviction, ageing=default.ageing, remember=default.remember)
    assert lru == pytest.approx(WEEK_HITS[size], abs=0.03)
    assert simulate(trace, served).tally().chunk_token_hit_rate >= lru
