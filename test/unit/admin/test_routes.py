"""The routes, with the schedulers' answers in our hands; and the docs that list them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from chunk_cache.keys import Partition, chunk_key
from sglang_chunk_cache.admin import administration as client
from sglang_chunk_cache.admin import routes
from sglang_chunk_cache.admin import scheduler_side as messages
from sglang_chunk_cache.admin.administration import Admin
from sglang_chunk_cache.admin.journal import Journal
from sglang_chunk_cache.admin.offline import EngineAdmin
from sglang_chunk_cache.flags import server_args as options
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs
from sglang_chunk_cache.host import admin_routes

DOC = Path(__file__).parents[3] / "docs" / "admin.md"
IDS = [[3, 4, 5], [6, 7]]
KEYS = [chunk_key(Partition(), ids) for ids in IDS]
KEY = KEYS[0].hex()


class Schedulers:
    """Answers by type of request, all replicas alike, or each by an entry of a list; `seen` holds all requests."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.results: dict[type, Any] = {}
        self.num_replicas = 1
        self.agree = True

    async def __call__(self, request: Any) -> list[messages.ChunkCacheAdminReply]:
        self.seen.append(request)
        result = self.results[type(request)]
        results = result if isinstance(result, list) else [result] * self.num_replicas
        replies = [messages.ChunkCacheAdminReply(ranks=[r], agree=self.agree, dp_rank=i) for i, r in enumerate(results)]
        return replies[::-1]  # as they arrive


@pytest.fixture
def schedulers() -> Schedulers:
    return Schedulers()


@pytest.fixture
def admin(schedulers: Schedulers, monkeypatch: pytest.MonkeyPatch) -> Admin:
    server_args = SimpleNamespace(dp_size=1)
    options.attach(server_args, ChunkCacheArgs())
    manager = SimpleNamespace(
        server_args=server_args,
        model_config=SimpleNamespace(vocab_size=100),
        tokenizer=None,
        auto_create_handle_loop=lambda: None,
        chunk_cache_selector=None,
    )
    manager.chunk_cache_admin = Admin(manager, schedulers, num_replicas=1)
    monkeypatch.setattr(admin_routes, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    return manager.chunk_cache_admin


def ask(method: str, path: str, body: Any = None, after_s: float = 0.0) -> httpx.Response:
    app = FastAPI()
    admin_routes.add_routes(app)

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            response = await http.request(method, f"/chunk_cache/{path}", json=body)
        await asyncio.sleep(after_s)
        return response

    return asyncio.run(call())


def pinned(**values: Any) -> dict[str, Any]:
    return {"pinned": {KEY: 3}, "is_refused": False, "pinned_tokens": 3, "max_pinned_tokens": 50, **values}


def test_a_pin_ends_by_a_message_that_names_its_end(admin, schedulers):
    schedulers.results = {messages.ChunkCachePinReq: pinned(), messages.ChunkCacheUnpinReq: {"unpinned": []}}
    response = ask("POST", "pin", {"input_ids": [*IDS, IDS[0]], "ttl_s": 0.05}, after_s=0.3)
    assert response.status_code == 200
    reply = response.json()
    assert [(entry["index"], entry["key"], entry["tokens"]) for entry in reply["pinned"]] == [(0, KEY, 3), (2, KEY, 3)]
    assert reply["not_stored"] == [{"index": 1, "key": KEYS[1].hex()}]
    begin, end = schedulers.seen
    assert begin.keys == KEYS, "each once"
    assert end == messages.ChunkCacheUnpinReq(until=begin.until)
    assert reply["until"] == begin.until


def test_a_clock_that_is_set_moves_no_end_of_a_pin(admin, schedulers, monkeypatch):
    schedulers.results = {messages.ChunkCachePinReq: pinned()}
    day = ask("POST", "pin", {"keys": [KEY], "ttl_s": 86400}).json()["until"]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * 86400)
    assert ask("POST", "pin", {"keys": [KEY], "ttl_s": 60}).json()["until"] < day


def test_the_limit_of_pins_is_a_409_with_the_numbers(admin, schedulers):
    schedulers.results = {messages.ChunkCachePinReq: pinned(pinned={}, is_refused=True, pinned_tokens=77)}
    response = ask("POST", "pin", {"keys": [KEY], "ttl_s": 9})
    assert response.status_code == 409
    assert (response.json()["error"]["pinned_tokens"], response.json()["error"]["max_pinned_tokens"]) == (77, 50)


def test_partitions_have_keys_of_their_own(admin, schedulers):
    schedulers.results = {messages.ChunkCacheEvictReq: {"evicted": {}}}
    for fields in ({}, {"extra_key": "", "cache_salt": ""}, {"extra_key": "a"}, {"cache_salt": "a"}):
        assert ask("POST", "evict", {"input_ids": IDS[:1], **fields}).status_code == 200
    keys = [request.keys[0] for request in schedulers.seen]
    assert keys[0] == keys[1] == KEYS[0], "as SGLang, empty is none"
    assert len(set(keys)) == 3
    assert keys[2:] == [chunk_key(Partition("a", None), IDS[0]), chunk_key(Partition(None, "a"), IDS[0])]


@pytest.mark.parametrize(
    ("route", "more", "request_type", "result"),
    [
        ("pin", {"ttl_s": 5}, messages.ChunkCachePinReq, pinned(pinned={})),
        ("unpin", {}, messages.ChunkCacheUnpinReq, {"unpinned": [], "pinned_tokens": 0}),
        ("evict", {}, messages.ChunkCacheEvictReq, {"evicted": {}}),
    ],
)
def test_unknown_keys_are_a_404(admin, schedulers, route, more, request_type, result):
    schedulers.results = {request_type: result}
    response = ask("POST", route, {"keys": [KEY], **more})
    assert response.status_code == 404
    assert KEY in response.json()["error"]["message"]


@pytest.mark.parametrize("reason", ["evicted", "weights_changed", "not_stored"])
def test_why_a_key_is_unknown_is_told(admin, schedulers, reason):
    told = {"total": 0, "variants": [], "tiers": {"disk": 1}, "reason": reason}
    schedulers.results = {messages.ChunkCacheVariantsReq: told}
    response = ask("GET", f"variants?key={KEY}")
    error = response.json()["error"]
    assert (response.status_code, error["reason"], error["tiers"]) == (404, reason, {"disk": 1})


def test_body_that_nests_too_deep_is_no_json(admin):
    class Nested(Request):
        async def body(self) -> bytes:
            return b"[" * 100_000

    answer = next(answer for _, path, answer in routes.ROUTES if path.endswith("/pin"))
    response = asyncio.run(routes.reply(answer, admin, Nested({"type": "http"})))
    assert response.status_code == 400
    assert b"body: not JSON" in response.body


def test_texts_need_a_tokenizer(admin, schedulers):
    for route in ("evict", "warm"):
        response = ask("POST", route, {"texts": ["a"]})
        assert response.status_code == 400
        assert "texts" in response.json()["error"]["message"]
        assert "--skip-tokenizer-init" in response.json()["error"]["message"]
    assert schedulers.seen == []


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ({"max_generation": 0}, {"neighbours": 2}, "neighbours: this server uses exact variants only"),
        ({}, {"neighbours": 2, "retriever": "some/model"}, "retriever: the server does not load 'some/model'"),
        ({}, {"neighbours": [[2]]}, "neighbours[0][0]: 2 is none of the 2 chunks"),
    ],
)
def test_what_cannot_be_prepared_is_refused_before_the_first_line(admin, schedulers, config, fields, message):
    options.attach(admin.manager.server_args, ChunkCacheArgs(config=config))
    response = ask("POST", "warm", {"input_ids": IDS, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert schedulers.seen == []


def _stored(tokens: dict[str, int], *, is_asking: bool = False) -> dict[str, Any]:
    return {"stored": tokens, "is_asking": is_asking}


def test_a_variant_is_stored_where_all_replicas_say_so(admin, schedulers):
    schedulers.results = {messages.ChunkCacheStoredReq: [_stored({KEY: 3}), _stored({KEY: 3, "ff": 1})]}
    assert asyncio.run(admin.stored_as({KEYS[0]: "one", KEYS[1]: "other"})) == {KEYS[0]: 3}
    assert schedulers.seen == [messages.ChunkCacheStoredReq(names={KEYS[0]: "one", KEYS[1]: "other"})]


def test_a_store_is_waited_for(admin, schedulers):
    schedulers.results = {messages.ChunkCacheStoredReq: [_stored({}), _stored({}, is_asking=True)]}
    schedulers.num_replicas = 2

    async def answered() -> dict[bytes, int]:
        asking = asyncio.ensure_future(admin.stored_as({KEYS[0]: "one"}))
        await asyncio.sleep(0.05)
        assert not asking.done()
        schedulers.results = {messages.ChunkCacheStoredReq: [_stored({KEY: 3})] * 2}
        return await asking

    assert asyncio.run(answered()) == {KEYS[0]: 3}
    assert [request.is_again for request in schedulers.seen[:2]] == [False, True]


def test_ranks_that_disagree_are_a_500(admin, schedulers):
    schedulers.results = {messages.ChunkCacheVariantsReq: {"total": 0, "variants": []}}
    assert ask("GET", "variants").json() == {"total": 0, "variants": [], "limit": 100, "offset": 0}
    schedulers.agree = False
    assert ask("GET", "variants").status_code == 500


def test_what_is_evicted_of_all_replicas_is_counted(admin, schedulers):
    def gone(variants: int, freed: int, **tiers: int) -> dict[str, Any]:
        return {"variants": variants, "freed_tokens": freed, "tiers": tiers}

    schedulers.results = {
        messages.ChunkCacheEvictReq: [
            {"evicted": {KEY: gone(2, 6, remote=1)}},
            {"evicted": {KEY: gone(1, 3, remote=2, host=1), KEYS[1].hex(): gone(0, 0, host=1)}},
        ]
    }
    first, second = ask("POST", "evict", {"input_ids": IDS}).json()["evicted"]
    assert first == {"index": 0, "key": KEY, **gone(3, 9, remote=2, host=1)}
    assert second == {"index": 1, "key": KEYS[1].hex(), **gone(0, 0, host=1)}


def test_evicting_everywhere_tells_what_stood_behind(admin, schedulers):
    def result(variants: int, freed: int, in_use: int) -> dict[str, Any]:
        behind = {"variants": variants, "freed_tokens": freed}
        return {"evicted": {}, "behind": behind, "emptied_tokens": 50, "in_use_tokens": in_use}

    schedulers.results = {messages.ChunkCacheEvictReq: [result(2, 6, 0), result(1, 3, 7)]}
    response = ask("POST", "evict", {"keys": [KEY], "everywhere": True})
    assert response.status_code == 200, "also where nobody knows the key any more"
    assert response.json() == {
        "evicted": [],
        "not_stored": [{"index": 0, "key": KEY}],
        "behind": {"variants": 3, "freed_tokens": 9},
        "emptied_tokens": 100,
        "in_use_tokens": 7,
    }
    assert schedulers.seen == [messages.ChunkCacheEvictReq(keys=[bytes.fromhex(KEY)], is_everywhere=True)]


def test_variants_of_all_replicas_are_listed(admin, schedulers):
    def page(reason: str, *uses: int) -> dict[str, Any]:
        variants = [{"id": i, "num_uses": num} for i, num in enumerate(uses)]
        return {"total": len(uses), "variants": variants, "tiers": {"host": len(uses)}, "reason": reason}

    def listed(query: str = "") -> list[tuple[int, int]]:
        return [(one["dp_rank"], one["id"]) for one in ask("GET", f"variants{query}").json()["variants"]]

    schedulers.results = {
        messages.ChunkCacheVariantsReq: [page("evicted"), page("not_stored", 3, 1), page("not_stored", 2)]
    }
    assert listed() == listed(f"?key={KEY}") == [(1, 0), (1, 1), (2, 0)]
    assert listed("?order=uses") == [(1, 0), (2, 0), (1, 1)]
    assert ask("GET", "variants").json()["total"] == 3
    assert ask("GET", f"variants?key={KEY}").json()["tiers"] == {"host": 2}
    schedulers.results = {messages.ChunkCacheVariantsReq: [page("not_stored"), page("evicted")]}
    assert ask("GET", f"variants?key={KEY}").json()["error"]["reason"] == "evicted"


def test_first_tokens_are_told_as_words(admin, schedulers):
    one = {"id": 0, "num_uses": 1, "first_ids": IDS[0][:2]}
    admin.manager.tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    schedulers.results = {messages.ChunkCacheVariantsReq: {"total": 1, "variants": [one]}}
    (listed,) = ask("GET", "variants").json()["variants"]
    assert listed["words"] == "3 4"
    assert "first_ids" not in listed


def test_pins_are_those_of_the_fullest_replica(admin, schedulers):
    schedulers.results = {messages.ChunkCachePinReq: [pinned(pinned={}, pinned_tokens=0), pinned(pinned_tokens=7)]}
    reply = ask("POST", "pin", {"input_ids": IDS[:1], "ttl_s": 9}).json()
    assert (reply["pinned"][0]["tokens"], reply["pinned_tokens"]) == (3, 7)
    schedulers.results[messages.ChunkCachePinReq][0] = pinned(pinned={}, is_refused=True, pinned_tokens=60)
    assert ask("POST", "pin", {"keys": [KEY], "ttl_s": 9}).status_code == 409


def test_a_caller_that_goes_does_not_leave_its_replies_to_the_next(admin, monkeypatch):
    answered = []

    async def slow(request: Any) -> list[Any]:
        await asyncio.sleep(0.1)
        answered.append(request)
        return []

    monkeypatch.setattr(admin, "_communicator", slow)

    async def call() -> None:
        task = asyncio.ensure_future(admin._ask(messages.ChunkCacheStatsReq()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.2)

    asyncio.run(call())
    assert len(answered) == 1


def test_flush_that_is_refused_is_a_409(admin):
    async def flush_cache(timeout_s: float) -> Any:
        return SimpleNamespace(success=False, message="")

    admin.manager.flush_cache = flush_cache
    response = ask("POST", "flush")
    assert response.status_code == 409
    assert "idle" in response.json()["error"]["message"]


def test_stats_names_the_options(admin, schedulers):
    schedulers.results = {messages.ChunkCacheStatsReq: {"dp_rank": 0, "tp_rank": 0}}
    stats = ask("GET", "stats").json()
    assert stats["ranks"] == [{"dp_rank": 0, "tp_rank": 0}]
    assert stats["config"]["method"] == "near-words"
    assert stats["config"]["discover"] is False
    assert stats["config"]["max_variants_per_chunk"] == 8
    assert stats["host"]["total_bytes"] >= stats["host"]["available_bytes"] > 0
    assert json.dumps(stats)


def test_an_engine_has_what_the_routes_have(admin, schedulers):
    engine = SimpleNamespace(tokenizer_manager=admin.manager, loop=asyncio.new_event_loop())
    own = EngineAdmin(engine)
    paths = {path.removeprefix(f"{routes.PREFIX}/") for _, path, _ in routes.ROUTES if path != routes.PREFIX}
    assert paths == {name for name in vars(EngineAdmin) if not name.startswith("_")}
    schedulers.results = {
        messages.ChunkCacheRequestsReq: Journal().contents(),
        messages.ChunkCacheVariantsReq: {"total": 0, "variants": []},
        messages.ChunkCacheEvictReq: {"evicted": {KEY: {"variants": 1, "freed_tokens": 3, "tiers": {}}}},
    }
    assert own.requests() == ask("GET", "requests").json()
    assert own.variants(limit=5, key=None) == ask("GET", "variants?limit=5").json()
    assert own.evict(input_ids=IDS) == ask("POST", "evict", {"input_ids": IDS}).json()
    engine.loop.close()


@pytest.mark.parametrize("path", [path for _, path, _ in routes.ROUTES])
def test_every_route_is_guarded_and_in_the_docs_and_added_once(path):
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel

    admin_routes.add_routes()
    admin_routes.add_routes()
    (route,) = (route for route in app.router.routes if getattr(route, "path", "") == path)
    assert route.endpoint._auth_level is AuthLevel.ADMIN_OPTIONAL
    assert f"$URL{path}" in DOC.read_text()


def test_client_module_knows_no_clock_of_the_schedulers():
    from chunk_cache.index import pins
    from sglang_chunk_cache.admin import scheduler_side

    for module in (pins, scheduler_side):
        assert not hasattr(module, "time")
    assert hasattr(client, "time")
