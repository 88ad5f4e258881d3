"""Two servers behind SGLang's model gateway: what passes it, what it drops, where it sends what, what dies.

A gateway passes bodies on as they are (`VERBATIM`), or reads them, so that it can send them again when a replica dies.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chunk_cache_tools.routing import KEY_HEADER, REPLICA_HEADER, ReplicaKeys, routing_key
from gateway import QUICK, Gateway, find_gateway
from server.conftest import FLAGS, STRICT
from server.contract import FULL, SEP, Marked, check_reply, marked, prime, statuses
from server.fleet_load import NUM_THREADS, NUM_TOKENS, Load, generate_body, replies_in
from server.tier_contract import wait_until
from server_fixture import Server

pytestmark = [
    pytest.mark.all,
    pytest.mark.server,
    pytest.mark.skipif(find_gateway() is None, reason="no gateway here (make gateway)"),
]

HASHING = ("--policy", "consistent_hashing")
VERBATIM = (*HASHING, "--max-buffered-request-bytes", "0")
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "model": "default"}


def replica(model_dir: Path) -> Server:
    flags = ("--chunk-cache", "--chunk-cache-ratio", "1", "--served-model-name", "default", "--enable-metrics")
    return Server(model_dir, *FLAGS, *flags, env=STRICT)


@pytest.fixture(scope="module")
def replicas(model_dir: Path) -> Iterator[list[Server]]:
    servers = [replica(model_dir) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def verbatim(replicas: list[Server]) -> Iterator[Gateway]:
    with Gateway([server.url for server in replicas], *VERBATIM) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def reading(replicas: list[Server]) -> Iterator[Gateway]:
    """It sends what it reads again where a replica fails; the gateway's default."""
    with Gateway([server.url for server in replicas], *HASHING, *QUICK) as gateway:
        yield gateway


# What passes.


def chat_body(prompt: Marked) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt.text}], "chunk_cache": FULL, **GREEDY}


BODIES = {
    "/generate": generate_body,
    "/v1/completions": lambda prompt: {"prompt": prompt.text, "custom_params": {"chunk_cache": FULL}, **GREEDY},
    "/v1/chat/completions": chat_body,
    "/v1/messages": chat_body,
}


def text_of(path: str, value: Any) -> str:
    if path == "/generate":
        return str(value["text"])
    if path == "/v1/messages":
        return str(value["content"][0]["text"])
    choice = value["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def usage_of(value: Mapping[str, Any]) -> dict[str, int]:
    """The two summaries of the reply in `usage`, on the route that says so."""
    usage = value["usage"]
    usage = usage.get("prompt_tokens_details") or usage
    return {kind: usage[f"chunk_{kind}_tokens"] for kind in ("reused", "recomputed")}


@pytest.mark.parametrize("name", ["verbatim", "reading"])
@pytest.mark.parametrize("path", BODIES)
def test_marks_options_and_replies_pass(request, replicas, passages, path, name):
    gateway = request.getfixturevalue(name)
    chunks = passages.several(3)
    for server in replicas:
        prime(server, chunks)
    prompt = marked(chunks[::-1], head="Through. ")
    body = BODIES[path](prompt)
    response = gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    value = response.json()
    (reply,) = replies_in(value)
    check_reply(reply, sum(reply[f"{kind}_tokens"] for kind in ("prefix", "reused", "computed")))
    assert (statuses(reply), reply["ratio"]) == (["hit"] * 3, 1.0)
    sums = {kind: reply[f"{kind}_tokens"] for kind in ("reused", "recomputed")}
    assert response.headers["x-chunk-cache"] == "reused={reused}, recomputed={recomputed}".format(**sums)
    assert path == "/generate" or usage_of(value) == sums
    (own,) = (server for server in replicas if server.url == response.headers[REPLICA_HEADER])
    body = {**body, "chunk_cache": {"mode": "off"}}
    if path in ("/generate", "/v1/completions"):
        params = body.pop("chunk_cache")
        holder = body.get("sampling_params", body)
        holder["custom_params"] = {"chunk_cache": params}
    assert text_of(path, value) == text_of(path, own.post(path, body).json())


@pytest.mark.parametrize("name", ["verbatim", "reading"])
@pytest.mark.parametrize("path", BODIES)
def test_streams_pass(request, replicas, passages, path, name):
    gateway = request.getfixturevalue(name)
    chunks = passages.several(2)
    for server in replicas:
        prime(server, chunks)
    body = {**BODIES[path](marked(chunks[::-1], head="A stream. ")), "stream": True}
    with gateway.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert len(lines) > 2
    assert (lines[-1] == "[DONE]") == (path != "/v1/messages")
    found = replies_in([json.loads(line) for line in lines if line != "[DONE]"])
    assert found
    assert statuses(found[-1]) == ["hit"] * 2
    assert response.headers["x-chunk-cache"].startswith(f"reused={found[-1]['reused_tokens']}, ")


WRONG = {
    "/generate": {"text": f"a{SEP}b"},
    "/v1/completions": {"prompt": f"a{SEP}b", **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "chunk_cache": {"ratio": 7}, **GREEDY},
    "/v1/messages": {"messages": [{"role": "user", "content": f"a{SEP}b"}], **GREEDY},
}


@pytest.mark.parametrize("path", WRONG)
def test_errors_pass_unchanged(replicas, verbatim, reading, path):
    direct = replicas[0].post(path, WRONG[path], check=False)
    for gateway in (verbatim, reading):
        through = gateway.http.post(path, json=WRONG[path])
        value = through.json()
        assert value.pop("request_id", "") or path != "/v1/messages", "which it adds there"
        assert (through.status_code, value) == (direct.status_code, direct.json())
    assert direct.status_code == 400


# What a gateway that reads bodies drops, as docs/fleet.md says.

PART = {"type": "text", "text": "The rose of the long winter is on the road to nothing."}
QUESTION = {"type": "text", "text": "Where is it?"}
CONTROL = {"cache_control": {"type": "ephemeral"}}
RESULT = {"type": "search_result", "source": "s", "title": "t", "content": [PART]}
DROPPED = {
    "texts": ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}, 422),
    "ids": ("/v1/completions", {"prompt": [1, 50, 51], **GREEDY}, 400),
}


def chat_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "chunk_cache": {"marks": True}, **GREEDY}


@pytest.mark.parametrize("name", DROPPED)
def test_what_a_gateway_that_reads_refuses(verbatim, reading, name):
    path, body, status = DROPPED[name]
    assert verbatim.http.post(path, json=body).status_code == 200
    assert reading.http.post(path, json=body).status_code == status


def test_marks_of_clients(verbatim, reading):
    """Those of chats are lost where the gateway reads; those of messages are not, nor search results."""
    for mark in (CONTROL, {"prompt_cache_breakpoint": {"type": "ephemeral"}}):
        body = chat_of({**PART, **mark}, QUESTION)
        (reply,) = replies_in(verbatim.http.post("/v1/chat/completions", json=body).json())
        assert len(reply["chunks"]) == 1
        (lost,) = replies_in(reading.http.post("/v1/chat/completions", json=body).json())
        assert lost["chunks"] == []
    for part in ({**PART, **CONTROL}, RESULT):
        for gateway in (verbatim, reading):
            (reply,) = replies_in(gateway.http.post("/v1/messages", json=chat_of(part, QUESTION)).json())
            assert len(reply["chunks"]) == 1
    parts = {**chat_of(PART, QUESTION), "chunk_cache": {"parts": True}}
    beside = {**chat_of(QUESTION), "chunk_cache": {"chunks": [{"text": PART["text"]}]}}
    documents = {**chat_of(QUESTION), "documents": [PART["text"]]}
    for body in (parts, beside, documents):
        (reply,) = replies_in(reading.http.post("/v1/chat/completions", json=body).json())
        assert len(reply["chunks"]) == 1


def test_administration_is_asked_of_each_replica(replicas, verbatim, passages):
    chunks = passages.several(1)
    for method, path in (("GET", "/chunk_cache/stats"), ("POST", "/chunk_cache/flush"), ("GET", "/chunk_cache")):
        assert verbatim.http.request(method, path).status_code == 404
    for server in replicas:
        prime(server, chunks)
    assert verbatim.http.post("/flush_cache").json()["workers_flushed"] == 2
    for server in replicas:
        (rank,) = server.get("/chunk_cache/stats").json()["ranks"]
        assert rank["index"]["num_variants"] == 0
    assert "sglang:chunk_cache_" in verbatim.http.get("/engine_metrics").text


# Where it sends what.


def sent_to(gateway: Gateway, headers: Mapping[str, str] | None = None, prompt: str = "Where?") -> str:
    """The replica that answered."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 1}}
    response = gateway.http.post("/generate", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers[REPLICA_HEADER]


@pytest.mark.parametrize("policy", ["random", "round_robin"])
def test_these_policies_spread_a_chunk_over_all(replicas, passages, policy):
    (chunk,) = passages.several(1)
    with Gateway([server.url for server in replicas], "--policy", policy) as gateway:
        urls = Counter(sent_to(gateway, prompt=marked([chunk], head=f"{i} ").text) for i in range(16))
    assert len(urls) == 2


def test_the_prefix_policy_looks_at_what_stands_in_front(replicas, passages):
    with Gateway([server.url for server in replicas], "--policy", "cache_aware") as gateway:
        prefix = passages(60)
        urls = {sent_to(gateway, prompt=prefix + f"{i}") for i in range(8)}
    assert len(urls) == 1


def test_requests_that_share_passages_meet(replicas, verbatim, passages):
    urls = set()
    for i in range(12):
        urls.add(sent_to(verbatim, {KEY_HEADER: routing_key(passages.several(3)), "authorization": f"Bearer {i}"}))
    assert urls == {server.url for server in replicas}, "another set, another place"

    chunks = passages.several(3)
    headers = {KEY_HEADER: routing_key(chunks)}
    found = []
    for i, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2])):
        prompt = marked([chunks[j] for j in order], head=f"Meet {i}. ")
        response = verbatim.http.post("/generate", json=generate_body(prompt), headers=headers)
        found.append(response.headers[REPLICA_HEADER])
        (reply,) = replies_in(response.json())
        assert statuses(reply) == ["hit" if i else "miss"] * 3
    assert len(set(found)) == 1


def test_who_knows_what_is_held_steers(replicas, verbatim, passages):
    """The seam: keys that lead to each replica are learned, and the one that holds the chunks is asked."""
    keys = ReplicaKeys()
    for _ in range(40):
        key = keys.new_key()
        response = verbatim.http.post("/generate", json={"text": "Where?"}, headers={KEY_HEADER: key})
        keys.note(key, response.headers)
        if len(keys.replicas()) == 2:
            break
    for server in replicas:
        chunks = passages.several(2)
        prime(server, chunks)
        for i in range(2):
            prompt = marked(chunks[::-1], head=f"Held {i}. ")
            headers = {KEY_HEADER: keys.key_to(server.url)}
            response = verbatim.http.post("/generate", json=generate_body(prompt), headers=headers)
            assert response.headers[REPLICA_HEADER] == server.url
            (reply,) = replies_in(response.json())
            assert statuses(reply) == ["hit"] * 2


# What dies and comes back.


@pytest.fixture
def load(reading: Gateway, passages: Any) -> Load:
    """Of its sets of chunks each replica gets some."""
    sets: list[list[str]] = []
    while len(sets) < 6 or len({sent_to(reading, {KEY_HEADER: routing_key(chunks)}) for chunks in sets}) < 2:
        sets.append(passages.several(2))
    return Load(reading, sets)


def test_a_replica_is_killed_under_load(replicas, reading, load):
    victim, other = replicas
    with load:
        wait_until(lambda: load.has_hits(victim) and load.has_hits(other), "no hits on both")
        os.killpg(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: load.has_hits(other, killed, num=100), "the other does not go on")
        victim.start()
        back = time.monotonic()
        wait_until(lambda: load.has_hits(victim, back), "hits do not come back")
    assert all(sent < killed for sent in load.lost), "a request was lost that was not in flight"
    assert len(load.lost) <= NUM_THREADS
    load.check_answers(other)


def test_the_gateway_is_killed_under_load(replicas, reading, load):
    load.retries = True
    with load:
        wait_until(lambda: all(load.has_hits(server) for server in replicas), "no hits on both")
        reading.kill()
        killed = time.monotonic()
        reading.start()
        wait_until(lambda: all(load.has_hits(server, killed, num=50) for server in replicas), "no hits afterwards")
    assert load.lost == []
    for server in replicas:
        after = load.statuses_of(server.url, killed)
        assert after.count("miss") <= 0.1 * len(after), "the replicas have kept all, and each gets what it had"
    load.check_answers(replicas[1])
