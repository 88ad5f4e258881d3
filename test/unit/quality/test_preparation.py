"""What preparation is worth, as it is measured: neighbours, deviation at the second layer, replies that are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from benchmark.quality.deviation import measure_deviation, reduction
from benchmark.quality.neighbourhood import neighbours_of
from benchmark.quality.prepared_session import PreparedSession
from benchmark.quality.prompts import Prompt

from chunk_cache_tools.verify.session import Asking, SetupError
from tiny_models import make_model

A, B, C = "cats and mice. ", "cats and dogs. ", "trains. "


def test_neighbours_are_of_one_corpus() -> None:
    prompts = [Prompt("S", (A, C), "?"), Prompt("S", (B,), "?"), Prompt("T", (A, B), "?")]
    found = neighbours_of(prompts, 1)
    assert found[prompts[0].partition] == {A: (B,), B: (A,), C: ()}
    assert found[prompts[2].partition] == {A: (B,), B: (A,)}


def test_behind_its_very_context_a_chunk_does_not_deviate(tmp_path: Any) -> None:
    model = make_model("qwen3", tmp_path / "model")
    prompts = [Prompt("Read. ", (A, B), "?"), Prompt("Read. ", (C, A, B), "?"), Prompt("Read. ", (A,), "?")]
    near = {prompts[0].partition: {A: (), B: (A,), C: ()}}
    same, other = measure_deviation(model, prompts, near)
    assert same.prepared < 1e-5 < 1e-2 < same.alone
    assert other.prepared > 1e-2
    assert same.alone_squared >= same.alone**2


def test_the_reduction_is_that_of_the_sums() -> None:
    share, low, high = reduction([(2.0, 1.0), (2.0, 0.0)])
    assert share == 0.75
    assert 0.5 <= low <= share <= high <= 1.0


class PreparingServer:
    """Answers what a session asks; `warmed` are the bodies of warming, `is_used` whether prepared chunks are used."""

    def __init__(self) -> None:
        self.warmed: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.is_used = True

    def flush(self) -> None:
        pass

    def ask(self, method: str, path: str) -> dict[str, Any]:
        values = {"/v1/loads": {"loads": [{"max_total_num_tokens": 100_000}]}, "/server_info": {"page_size": 1}}
        return values[path]

    def lines(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        assert path == "/chunk_cache/warm"
        self.warmed.append(body)
        yield json.dumps({"summary": True, "failed": self.failed})


PROMPTS = [Prompt("S", (A, B, C), "?")]


def session_of(server: Any) -> PreparedSession:
    return PreparedSession(server, Asking(max_new_tokens=4), neighbours_of(PROMPTS, 1))


def test_each_chunk_is_warmed_with_its_neighbours() -> None:
    server = PreparingServer()
    session_of(server).prime(PROMPTS)
    (body,) = server.warmed
    assert (body["texts"], body["neighbours"]) == ([A, B, C], [[1], [0], []])
    assert (body["prefix_text"], body["extra_key"]) == ("S", PROMPTS[0].partition)
    server.failed = [{"index": 0, "error": "texts[0]: no good"}]
    with pytest.raises(SetupError, match=r"texts\[0\]: no good"):
        session_of(server).prime(PROMPTS)


def test_a_chunk_that_was_not_used_as_prepared_ends_the_run() -> None:
    session = session_of(PreparingServer())
    chunks: list[dict[str, Any]] = [{"status": "prefix"}, {"status": "hit", "kind": "prepared"}, {"status": "hit"}]
    session._check_stored(PROMPTS[0], {"chunks": chunks})
    chunks[1]["kind"] = "met"
    with pytest.raises(SetupError, match=r"Chunk 2 of prompt .* was not used as prepared"):
        session._check_stored(PROMPTS[0], {"chunks": chunks})
