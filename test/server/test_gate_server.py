"""The gate on a real server: replies are verified while it is idle, requests come first, a target is kept."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.conftest import FLAGS, STRICT
from server.contract import Passages, generated, marked, prime
from server_fixture import Server

pytestmark = pytest.mark.server

CONFIG = {"verify_share": 1.0}
TARGET = {"kl": 1e-6, "steps": [["epic", 0.1], ["epic", 0.5]]}
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def gate(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A target that random weights cannot meet."""
    file = tmp_path_factory.mktemp("gate") / "gate.json"
    config = json.dumps({**CONFIG, "verify_file": str(file)})
    flags = (*FLAGS, "--enable-metrics", "--chunk-cache", "--chunk-cache-config", config)
    with Server(model_dir, *flags, "--chunk-cache-target", json.dumps(TARGET), env=STRICT) as server:
        yield server
        assert server.alive()
        assert "memory leak detected" not in server.log
    assert json.loads(file.read_text())["quality"], "nothing was kept for the next start"


def stats(server: Server) -> Any:
    return server.get("/chunk_cache/stats").json()["ranks"][0]["gate"]


def settled(server: Server) -> Any:
    """What the gate knows when nothing waits any more; asking is a request that it gives way to."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := stats(server))["requests"]["waiting"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not found["requests"]["waiting"], found["requests"]
    return found


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"sglang:{name}(\{{|_total\{{)", line))


def test_replies_are_verified_and_requests_answered_meanwhile(gate: Server, passages: Passages) -> None:
    before = settled(gate)["requests"]
    chunks = passages.several(6, num_words=30)
    prime(gate, chunks, extra_key="mixed")
    fused = [marked([passages(4), *chunks[i:], *chunks[:i]]).text for i in range(1, 6)]
    plain = [passages(40) for _ in range(10)]
    with ThreadPoolExecutor(4) as pool:
        options = {"chunk_cache": {"ratio": 0.2}, "extra_key": "mixed"}
        outs = list(pool.map(lambda text: gate.generate(text, **options), fused))
        others = list(pool.map(lambda text: gate.generate(text, max_new_tokens=4), plain))
    assert all(generated(out)["reused_tokens"] for out in outs)
    assert all("target" not in generated(out) for out in outs)
    assert len(others) == len(plain)
    after = settled(gate)
    assert after["requests"]["verified"] == before["verified"] + 5, after["requests"]
    row = next(row for row in after["quality"] if row["partition"] != "default")
    assert (row["method"], row["ratios"], row["kl"]["count"]) == ("near-words", "0.1-0.2", 5)
    assert metric(gate, "chunk_cache_verified_kl_count") == after["requests"]["verified"]
    assert metric(gate, "chunk_cache_verifications") >= after["requests"]["verified"]


def test_a_target_that_cannot_be_met_makes_requests_exact(gate: Server, passages: Passages) -> None:
    chunks = passages.several(4, num_words=25)
    prime(gate, chunks)
    replies = []
    for i in range(6):
        out = gate.generate(marked([passages(3), *chunks[i % 4 :], *chunks[: i % 4]]).text)
        replies.append(generated(out))
        settled(gate)
    assert [reply["target"]["step"] for reply in replies] == [0, 0, 1, 1, 2, 2]
    assert [reply["ratio"] for reply in replies[:4]] == [0.1, 0.1, 0.5, 0.5]
    assert [reply["fallback_reason"] for reply in replies] == [None] * 4 + ["target"] * 2
    assert "had a KL above" in replies[-1]["target"]["reason"]
    assert stats(gate)["target"]["partitions"]["default"]["is_exact"]
    assert metric(gate, "chunk_cache_target_step") == 2
    assert "the target moves partition default: exact prefill" in gate.log


def test_what_waits_survives_a_flush(gate: Server, passages: Passages) -> None:
    chunks = passages.several(2, num_words=60)
    prime(gate, chunks, extra_key="flushed")
    before = settled(gate)["requests"]
    text = marked([passages(3), *reversed(chunks)]).text
    gate.generate(text, chunk_cache={"ratio": 0.1}, extra_key="flushed")
    gate.flush()
    after = settled(gate)["requests"]
    assert after["verified"] == before["verified"] + 1
    assert after["dropped"] == before["dropped"]
