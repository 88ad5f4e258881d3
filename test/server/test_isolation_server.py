"""Between tenants: what one has stored changes nothing that another can read, in replies, headers, counters and errors.

A tenant who sends passages that another has stored is compared with one who sends passages of the same lengths that
nobody has. How well time tells is measured by `benchmark/isolation/bench_timing.py`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.keys import Partition
from server.conftest import STRICT
from server_fixture import Server

pytestmark = pytest.mark.server

RNG = random.Random("tenants")
CHUNKS, LENGTH = 3, 24


def passages() -> list[list[int]]:
    """Token ids that nobody has sent before."""
    return [[RNG.randrange(10, 260) for _ in range(LENGTH)] for _ in range(CHUNKS)]


def ask(server: Server, chunks: list[list[int]], tenant: str, **body: Any) -> tuple[Any, Any]:
    """Reply and headers of a prompt with these chunks behind a head of its own."""
    head = [RNG.randrange(10, 260) for _ in range(7)]
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    sampling = {
        "max_new_tokens": 1,
        "temperature": 0,
        "custom_params": {"chunk_cache": {"spans": spans, "explain": True}},
    }
    request = {"input_ids": [*ids, 11, 12, 13], "sampling_params": sampling, "extra_key": tenant, **body}
    response = server.post("/generate", request)
    return response.json()["meta_info"], response.headers


def counters(server: Server) -> dict[str, float]:
    """All counters of the chunk cache and of cached tokens that an observer of `/metrics` reads; no times."""
    found = re.findall(r"^(sglang:(?:chunk_cache|cached_tokens)\S*) (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in found if "seconds" not in name and "_created" not in name}


def told(server: Server, chunks: list[list[int]], tenant: str) -> tuple[Any, ...]:
    """What a request lets its tenant and an observer know."""
    before = counters(server)
    meta, headers = ask(server, chunks, tenant)
    after = counters(server)
    reply = meta["chunk_cache"]
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    return reply, meta["cached_tokens"], headers.get("x-chunk-cache"), sorted(headers), grown


def test_replies_headers_and_counters(server: Server):
    for _ in range(3):
        stored = passages()
        told(server, stored, "first tenant")
        told(server, stored, "first tenant")
        assert told(server, stored, "second tenant") == told(server, passages(), "third tenant")


def test_numbers_of_variants_do_not_count(server: Server):
    """Two of them do not tell how much others stored in between."""
    numbers = []
    for _ in range(2):
        own = passages()
        ask(server, own, "first tenant")
        chunks = ask(server, own, "first tenant")[0]["chunk_cache"]["chunks"]
        numbers += [chunk["variant"] for chunk in chunks if "variant" in chunk]
    assert len(numbers) > 2
    assert min(abs(a - b) for a, b in combinations(numbers, 2)) > 1000


def test_a_label_that_nobody_allowed(server: Server):
    """It ends a stock server with metrics."""
    request = {"input_ids": [11, 12, 13], "sampling_params": {"max_new_tokens": 1}}
    refused = server.post("/generate", {**request, "custom_labels": {"a": "b"}}, check=False)
    assert refused.status_code == 400
    assert "custom_labels.a: " in refused.text
    assert server.post("/generate", request).status_code == 200


def test_the_same_tenant_is_told(server: Server):
    """The comparison would see it."""
    stored = passages()
    told(server, stored, "first tenant")
    assert told(server, stored, "first tenant") != told(server, passages(), "third tenant")


@pytest.mark.parametrize("route", ["evict", "pin", "unpin"])
def test_administration_answers_within_a_partition(server: Server, route: str):
    stored = passages()
    told(server, stored, "first tenant")

    def answer(chunks: list[list[int]]) -> Any:
        body: dict[str, Any] = {"input_ids": chunks, "extra_key": "second tenant"}
        if route == "pin":
            body["ttl_s"] = 5
        response = server.post(f"/chunk_cache/{route}", body, check=False)
        return response.status_code, hidden(response.text)

    assert answer(stored) == answer(passages())


def test_errors(server: Server):
    stored = passages()
    told(server, stored, "first tenant")
    bad: list[Callable[[], dict[str, Any]]] = [
        lambda: {"method": "no such method"},
        lambda: {"spans": [[0, 10**6]]},
        lambda: {"keep_tokens": 1},
    ]
    for options in bad:
        texts = []
        for chunks in (stored, passages()):
            ids = [token for chunk in chunks for token in chunk]
            spans = {"spans": [[0, LENGTH], [LENGTH, 2 * LENGTH]]} | options()
            sampling = {"max_new_tokens": 1, "custom_params": {"chunk_cache": spans}}
            request = {"input_ids": ids, "sampling_params": sampling, "extra_key": "second tenant"}
            response = server.post("/generate", request, check=False)
            assert response.status_code == 400
            texts.append(hidden(response.text))
        assert texts[0] == texts[1]


def hidden(text: str) -> str:
    """The text without what differs by itself: keys, which are made of the ids that were sent, and points in time."""
    return re.sub(r'"until":[0-9.]+', "UNTIL", re.sub(r"[0-9a-f]{32}", "KEY", text))


@pytest.mark.all
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_tenant_that_floods(model_dir: Path, share: float):
    """With a quota it makes room out of its own; without one it evicts what others have stored."""
    flags = ("--dtype", "float32", "--max-total-tokens", "1024", "--chunk-cache")
    with Server(
        model_dir, *flags, "--chunk-cache-config", json.dumps({"partition_share": share}), env=STRICT
    ) as server:
        stored = passages()
        ask(server, stored, "quiet")
        for _ in range(40):
            ask(server, passages(), "noisy")
        meta, _ = ask(server, stored, "quiet")
        statuses = [chunk["status"] for chunk in meta["chunk_cache"]["chunks"]]
        assert statuses == ["hit" if share < 1.0 else "miss"] * CHUNKS
        (rank,) = server.get("/chunk_cache/stats").json()["ranks"]
        given_way, held = rank["tiers"]["pool"]["share_evicted_tokens"], rank["partitions"].get("pool_tokens")
        if share == 1.0:
            assert (given_way, held) == (0, None)
        else:
            assert given_way > 1024
            assert all(held[Partition(tenant).name] > CHUNKS * LENGTH for tenant in ("quiet", "noisy")), held
            assert sum(held.values()) <= 1024
