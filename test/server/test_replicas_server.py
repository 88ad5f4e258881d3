"""Two servers on one store, Mooncake's and Valkey's: what one computes the other reuses, and neither needs the other.

In every case the answer is that without reuse; what was not stored, or is gone, is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.keys import Partition, chunk_key
from server.contract import Marked, Passages, chunk_ids, marked, prime, reasons, statuses
from server.tier_contract import (
    REQUEST_TIMEOUT_S,
    assert_right,
    kill_while_writing,
    metric,
    reuse,
    store_on,
    tier_flags,
    tier_server,
    tiers,
    wait_until,
    written,
)
from server_fixture import Server
from unit.tiers.mooncake_master import library_env
from unit.tiers.redis_server import RedisServer
from unit.tiers.stores import HOW_TO_GET, STORES, find_store

pytestmark = [pytest.mark.all, pytest.mark.server]

GONE = {"tier_unavailable", "tier_timeout"}


@dataclass
class Fleet:
    """A store and two servers on it."""

    store: Any
    first: Server
    second: Server


@pytest.fixture(scope="module", params=STORES)
def fleet(request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = find_store(request.param, tmp_path_factory.mktemp("store"))
    if found is None:
        pytest.skip(f"no {request.param} here ({HOW_TO_GET[request.param]})")
    store, url = found
    store.start()
    flags = tier_flags(remote={"url": url}, timeout_s=10)
    try:
        with (
            tier_server(model_dir, *flags, variables=library_env()) as first,
            tier_server(model_dir, *flags, variables=library_env()) as second,
        ):
            yield Fleet(store, first, second)
    finally:
        store.kill()


def test_one_writes_and_all_read(fleet: Fleet, passages: Passages, tokenizer: Any):
    chunks = passages.several(3)
    store_on(fleet.first, "remote", chunks)
    for server in (fleet.second, fleet.first):
        server.flush()
        prompt = marked(chunks[::-1], head=f"Read {server.port}. ")
        out, reply = reuse(server, prompt, tokenizer)
        assert tiers(reply) == ["remote"] * 3
        assert_right(server, prompt, out)


def test_what_one_wrote_another_warms_not_again(fleet: Fleet, passages: Passages):
    """It has not read it, so it asks the store."""
    chunks = passages.several(3)
    with written(fleet.first, "remote", 2):
        fleet.first.post("/chunk_cache/warm", {"texts": chunks[:2]})
    summary = json.loads(fleet.second.post("/chunk_cache/warm", {"texts": chunks}).text.splitlines()[-1])
    assert (summary["already"], summary["stored"], summary["present"]) == (2, 1, 3)


def test_both_write_the_same_at_once(fleet: Fleet, passages: Passages, tokenizer: Any):
    chunks = passages.several(6)
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(prime, server, chunks) for server in (fleet.first, fleet.second)]:
            one.result(timeout=REQUEST_TIMEOUT_S)
    for server in (fleet.first, fleet.second):
        prompt = marked(chunks, head=f"Both {server.port}. ")
        wait_until(lambda: _are_remote(server, prompt, tokenizer), "they do not come from the store")  # noqa: B023
        out, _ = reuse(server, prompt, tokenizer)
        assert_right(server, prompt, out)


def test_partitions_do_not_meet(fleet: Fleet, passages: Passages, tokenizer: Any):
    chunks = passages.several(2)
    store_on(fleet.first, "remote", chunks)
    prompt = marked(chunks, head="Apart. ")
    out, reply = reuse(fleet.second, prompt, tokenizer, extra_key="another tenant")
    assert (statuses(reply), reasons(reply)) == (["miss"] * 2, ["not_stored"] * 2)
    assert_right(fleet.second, prompt, out, extra_key="another tenant")


def _values(store: RedisServer) -> dict[tuple[bytes, bytes], bytes]:
    """All that a store holds of chunks."""
    client = store.client()
    names = [name for name in client.scan_iter("chunk_cache:*") if client.type(name) == b"hash"]
    return {(name, field): value for name in names for field, value in client.hgetall(name).items()}


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_what_was_damaged_in_the_store_is_never_used(fleet: Fleet, passages: Passages, tokenizer: Any, damage: str):
    if not isinstance(fleet.store, RedisServer):
        pytest.skip("values of Mooncake's store are in the replicas' own memory")
    chunks = passages.several(2)
    before = _values(fleet.store)
    store_on(fleet.first, "remote", chunks)
    for (name, field), value in _values(fleet.store).items():
        if (name, field) not in before and field not in (b"layers",) and len(value) > 1000:
            flipped = value[:-1] + bytes([value[-1] ^ 1])
            fleet.store.client().hset(name, field, flipped if damage == "flip" else value[: len(value) // 2])
    fleet.second.flush()
    prompt = marked(chunks, head=f"Damaged {damage}. ")
    out, reply = reuse(fleet.second, prompt, tokenizer)
    assert (statuses(reply), reasons(reply)) == (["miss"] * 2, ["tier_corrupt"] * 2)
    assert_right(fleet.second, prompt, out)


def test_what_is_deleted_everywhere_is_nowhere(fleet: Fleet, passages: Passages, tokenizer: Any):
    """Each replica is asked; then a chunk, and what stood behind it, is in no pool and not in the store."""
    before = _values(fleet.store) if isinstance(fleet.store, RedisServer) else {}
    gone, behind, other = passages.several(3)
    store_on(fleet.first, "remote", [other])
    prepared = {"texts": [gone, behind], "neighbours": [[], [0]]}
    with written(fleet.first, "remote", 2):
        fleet.first.post("/chunk_cache/warm", prepared)
    assert _num_stored(fleet.first, prepared) == 2
    reuse(fleet.second, marked([other, gone], head="Used. "), tokenizer)

    servers = (fleet.first, fleet.second)
    body = {"texts": [gone], "everywhere": True}
    replies = [server.post("/chunk_cache/evict", body).json() for server in servers]
    assert replies[0]["behind"]["variants"] == 1
    assert [reply["in_use_tokens"] for reply in replies] == [0, 0]
    key = replies[0]["evicted"][0]["key"]
    for server in servers:
        assert server.get(f"/chunk_cache/variants?key={key}", check=False).status_code == 404
    if isinstance(fleet.store, RedisServer):

        def is_gone() -> bool:
            new = {place: value for place, value in _values(fleet.store).items() if place not in before}
            return not any(key.encode() in name or key.encode() in value for (name, _), value in new.items())

        wait_until(is_gone, "its key is still in the store, or in what was computed behind it")
    wait_until(lambda: not _num_stored(fleet.first, prepared), "what stood behind it is still in the store")
    prompt = marked([other, gone, behind], head="Asked. ")
    out, reply = reuse(fleet.second, prompt, tokenizer)
    assert statuses(reply) == ["hit", "miss", "miss"]
    assert_right(fleet.second, prompt, out)


def _num_stored(server: Server, warmed: dict[str, Any]) -> int:
    """Of what was warmed so, in its pool or in the store, which it asks where it does not know."""
    return int(json.loads(server.post("/chunk_cache/warm", {**warmed, "dry_run": True}).text)["already"])


def test_without_the_salt_nobody_can_ask(fleet: Fleet, passages: Passages, tokenizer: Any):
    """Neither a request nor the administration nor a key of the store tells that a tenant has a text."""
    (text,) = passages.several(1)
    fields = {"cache_salt": "of the first tenant"}
    store_on(fleet.first, "remote", [text], **fields)
    if isinstance(fleet.store, RedisServer):
        own = chunk_key(Partition(), chunk_ids(tokenizer, text)).hex().encode()
        assert not any(own in name for name, _ in _values(fleet.store))
    fleet.second.flush()
    _, reply = reuse(fleet.second, marked([text], head="Guessed. "), tokenizer)
    assert (statuses(reply), reasons(reply)) == (["miss"], ["not_stored"])


def test_the_store_is_killed_and_comes_back(fleet: Fleet, passages: Passages, tokenizer: Any):
    chunks = passages.several(2)
    store_on(fleet.first, "remote", chunks)
    fleet.store.kill()
    for server in (fleet.first, fleet.second):
        server.flush()
        prompt = marked(chunks, head=f"Without {server.port}. ")
        out, reply = reuse(server, prompt, tokenizer)
        assert statuses(reply) == ["miss"] * 2
        assert set(reasons(reply)) <= GONE
        assert_right(server, prompt, out)
    fleet.store.start()  # empty: what was there is gone
    wait_until(lambda: _shares(fleet, passages, tokenizer), "it never comes back", 60.0)


def _shares(fleet: Fleet, passages: Passages, tokenizer: Any) -> bool:
    chunks = passages.several(1)
    prime(fleet.first, chunks)
    fleet.second.flush()
    with suppress(AssertionError):
        wait_until(lambda: _are_remote(fleet.second, marked(chunks, head="Shared. "), tokenizer), "", 3.0)
        return True
    return False


def _are_remote(server: Server, prompt: Marked, tokenizer: Any) -> bool:
    server.flush()
    return tiers(reuse(server, prompt, tokenizer)[1]) == ["remote"] * len(prompt.chunks)


def test_a_replica_is_killed_while_it_writes(fleet: Fleet, passages: Passages, tokenizer: Any):
    """Last: the first server does not come back."""
    chunks = passages.several(60, num_words=20)
    prompts = [marked(chunks[i : i + 3], head=f"{i} ") for i in range(0, len(chunks), 3)]
    before = metric(fleet.first, "writes_total", tier="remote", outcome="ok")

    kill_while_writing(
        fleet.first,
        prompts,
        lambda: metric(fleet.first, "writes_total", tier="remote", outcome="ok") >= before + 15,
    )
    fleet.second.flush()
    hits = 0
    for prompt in prompts:
        out, reply = reuse(fleet.second, prompt, tokenizer)
        hits += statuses(reply).count("hit")
        assert_right(fleet.second, prompt, out)
    if isinstance(fleet.store, RedisServer):  # Mooncake's memory is the replicas' own
        assert hits >= 15
    more = passages.several(2)
    store_on(fleet.second, "remote", more)
    fleet.second.flush()
    assert tiers(reuse(fleet.second, marked(more, head="After. "), tokenizer)[1]) == ["remote"] * 2
