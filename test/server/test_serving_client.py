"""The serving benchmark's load generator, and SGLang's own tool with our data set, against a real server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmark.serving import traces
from benchmark.serving.client import closed_loop, open_loop
from benchmark.serving.measures import share_right, summarize
from benchmark.serving.prompt import Prompt
from benchmark.serving.systems import parse_systems

from server_fixture import Server

pytestmark = pytest.mark.server
NUM = 24


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return traces.notes(traces.NotesSpec(NUM, num_sets=3))


def bodies(prompts: Sequence[Prompt], name: str) -> list[dict[str, Any]]:
    (system,) = parse_systems([name])
    return [prompt.body(system.options) for prompt in prompts]


def test_records_are_of_their_prompts(trained_server: Server, prompts: list[Prompt]) -> None:
    trained_server.flush()
    run = closed_loop(trained_server.url, bodies(prompts, "epic@1"), 4)
    assert [record.error for record in run.records] == [None] * NUM
    for prompt, record in zip(prompts, run.records, strict=True):
        words = len("".join([prompt.head, *(chunk.content for chunk in prompt.chunks), prompt.tail]).split())
        assert record.prompt_len == words + 1  # and BOS
        assert record.num_chunks == len(prompt.chunks)
        assert record.due_s <= record.first_s <= record.end_s <= run.seconds
        assert record.rows == record.prompt_len - record.prefix_len, "ratio 1 computes all that is no exact prefix"
    # What a trained model answers shows that texts and prompts were not mixed up.
    assert share_right(prompts, run.records) > 0.9
    assert sum(record.reused_len for record in run.records) > 0


def test_a_closed_loop_keeps_so_many_in_flight(trained_server: Server, prompts: list[Prompt]) -> None:
    run = closed_loop(trained_server.url, bodies(prompts, "epic"), 3)
    for record in run.records:
        in_flight = sum(other.due_s <= record.due_s < other.end_s for other in run.records)
        assert in_flight <= 3
    assert max(record.due_s for record in run.records) > 0


def test_an_open_loop_sends_when_it_is_due(trained_server: Server, prompts: list[Prompt]) -> None:
    arrivals = [0.05 * number for number in range(NUM)]
    run = open_loop(trained_server.url, bodies(prompts, "epic"), arrivals)
    assert [record.due_s for record in run.records] == arrivals
    assert all(record.error is None and record.first_s > record.due_s for record in run.records)
    found = summarize(run, bound_s=1e6)
    assert found["goodput_per_s"] == pytest.approx(found["requests_per_s"], abs=1e-3)


def test_a_refused_request_is_a_failure_and_no_other(trained_server: Server, prompts: list[Prompt]) -> None:
    asked = bodies(prompts[:3], "epic")
    asked[1]["sampling_params"]["custom_params"]["chunk_cache"]["ratio"] = 7
    records = closed_loop(trained_server.url, asked, 1).records
    assert [record.error is None for record in records] == [True, False, True]
    assert "ratio" in (records[1].error or "")


def test_nobody_listens() -> None:
    (record,) = closed_loop("http://127.0.0.1:9", [{"text": "x"}], 1).records
    assert record.error is not None
    assert "ConnectError" in record.error
