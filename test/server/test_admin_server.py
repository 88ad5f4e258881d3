"""/chunk_cache/... on a real server with an API key: every route, bad input, pins under pressure, warming, the command.

One server of this module's own. SGLang's checks of its KV pool are strict here, while busy and while idle: a pin that
were taken for a leak would end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.admin_server import KEY, AdminServer
from server.conftest import FLAGS, MAX_TOTAL_TOKENS, STRICT
from server.contract import chunk_ids, generated, marked, prime, statuses
from server_fixture import Server
from sglang_chunk_cache.admin.admin_page import page

pytestmark = pytest.mark.server

UNKNOWN = "00" * 16
SEP = "<|chunk|>"
TRANSPORTS = [pytest.param("0", id="typed"), pytest.param("1", id="pickled", marks=pytest.mark.all)]


@pytest.fixture(scope="module", params=TRANSPORTS)
def admin(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[AdminServer]:
    """The chunk cache with an API key; typed messages between its processes, in the full matrix pickled ones too."""
    env = {**STRICT, "SGLANG_USE_PICKLE_IPC": request.param}
    with AdminServer(model_dir, *FLAGS, "--enable-metrics", "--chunk-cache", "--api-key", KEY, env=env) as server:
        yield server
        assert server.alive()
        assert "memory leak detected" not in server.log


@pytest.fixture
def empty(admin: AdminServer) -> AdminServer:
    """The same server, flushed."""
    admin.ask("flush", timeout_s=10)
    return admin


def fill(server: Server, num_tokens: int, passages: Any) -> None:
    """Prompts of so many tokens together, none of which was sent before."""
    for _ in range(num_tokens // 500):
        out = server.generate(passages(400), max_new_tokens=1)
        assert out["meta_info"]["prompt_tokens"] > 500


# Who may ask, and what is wrong.


@pytest.mark.parametrize("route", ["stats", "requests", "variants"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer no"}])
def test_get_without_the_key_is_a_401(admin, route, headers):
    assert httpx.get(f"{admin.url}/chunk_cache/{route}", headers=headers, trust_env=False).status_code == 401


@pytest.mark.parametrize("route", ["pin", "unpin", "evict", "flush", "warm"])
def test_post_without_the_key_is_a_401(admin, route):
    response = httpx.post(f"{admin.url}/chunk_cache/{route}", json={"all": True}, trust_env=False)
    assert response.status_code == 401


def test_the_page_needs_no_key_and_is_the_same_for_all(admin):
    url, given = f"{admin.url}/chunk_cache", {"Authorization": f"Bearer {KEY}"}
    shown = httpx.get(url, trust_env=False)
    assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert shown.text == httpx.get(url, headers=given, trust_env=False).text == page()[0]
    assert shown.headers["content-security-policy"] == page()[1]
    head = httpx.head(url, trust_env=False)
    assert (head.status_code, head.text, head.headers["content-length"]) == (200, "", str(len(shown.content)))
    assert httpx.get(f"{url}/", trust_env=False, follow_redirects=True).url == url
    for method, path in (("POST", ""), ("HEAD", "/stats"), ("GET", "//"), ("GET", "/%2e%2e/flush_cache"), ("GET", "s")):
        assert httpx.request(method, url + path, trust_env=False).status_code == 401, (method, path)


@pytest.mark.parametrize(
    ("route", "body", "start"),
    [
        ("pin", {"texts": ["a"]}, "ttl_s: missing"),
        ("pin", {"texts": ["a", f"b{SEP}c"], "ttl_s": 5}, "texts[1]: has a separator"),
        ("pin", {"texts": [" "], "ttl_s": 5}, "texts[0]: the chunk is empty"),
        ("pin", {"input_ids": [[10**6]], "ttl_s": 5}, "input_ids[0]: a token id is not in the vocabulary"),
        ("unpin", {}, "texts: missing"),
        ("evict", {"keys": ["abc"]}, "keys[0]: 'abc' is not a chunk key"),
        ("evict", [], "body: "),
        ("evict", {"texts": ["a"], "everywhere": 1}, "everywhere: 1 is neither true nor false"),
        ("flush", {"timeout_s": -1}, "timeout_s: "),
        ("warm", {"texts": [3]}, "texts[0]: "),
        ("warm", {"texts": ["a"], "batch": 1000}, "batch: "),
        ("warm", {"texts": ["a"], "prefix_ids": [10**6]}, "prefix_ids: a token id"),
        ("warm", {"texts": ["a"], "prefix_text": SEP}, "prefix_text: has a separator"),
    ],
)
def test_bad_input_names_the_path(admin, route, body, start):
    status, message = admin.refuse(route, body)
    assert (status, message[: len(start)]) == (400, start)


def test_bad_json_and_bad_queries(admin):
    response = admin.client.http.post("/chunk_cache/pin", content=b'{"texts": [')
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("body: not JSON")
    for query, start in (("limit=0", "limit: "), ("key=1", "key: "), ("page=1", "page: ")):
        response = admin.get(f"/chunk_cache/variants?{query}", check=False)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(start)


def test_unknown_keys_are_a_404(admin):
    assert admin.get(f"/chunk_cache/variants?key={UNKNOWN}", check=False).status_code == 404
    for route, more in (("pin", {"ttl_s": 5}), ("unpin", {}), ("evict", {})):
        status, message = admin.refuse(route, {"keys": [UNKNOWN], **more})
        assert status == 404
        assert UNKNOWN in message


# Looking.


def test_requests_are_told_without_texts_and_salts(empty, passages):
    prompt = marked(passages.several(2))
    for _ in range(2):
        out = empty.generate(prompt.text, rid="mine", cache_salt="secret salt", extra_key="secret key")
    response = empty.get("/chunk_cache/requests")
    journal = response.json()
    told, first = journal["requests"][:2]
    reply = out["meta_info"]["chunk_cache"]
    assert (told["id"], told["partition"]) == ("mine", first["partition"])
    assert told["partition"] != "default"
    assert [told[name] for name in reply if name != "chunks"] == [reply[name] for name in reply if name != "chunks"]
    assert statuses(told) == statuses(reply)
    assert sum(map(sum, told["picture"])) == out["meta_info"]["prompt_tokens"]
    assert [minute["at"] for minute in journal["minutes"]] == sorted({minute["at"] for minute in journal["minutes"]})
    assert sum(minute["requests"] for minute in journal["minutes"]) == journal["totals"]["requests"]
    for hidden in ("secret", prompt.chunks[0].strip(), prompt.question):
        assert hidden not in response.text
    empty.generate("Nobody marks anything.")
    assert empty.get("/chunk_cache/requests").json() == journal, "of requests without marks nothing is told"


def test_a_request_that_is_aborted_is_told_once_or_not_at_all(empty, passages):
    prompt = marked(passages.several(2))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(empty.generate, prompt.text, max_new_tokens=400, rid="aborted")
        while not running.done():  # one that comes before the request does nothing
            empty.post("/abort_request", {"rid": "aborted"})
            time.sleep(0.02)
        reason = running.result(timeout=60)["meta_info"]["finish_reason"]["type"]
    assert reason == "abort"
    told = [one["id"] for one in empty.get("/chunk_cache/requests").json()["requests"]]
    assert told.count("aborted") <= 1
    assert empty.rank()["tiers"]["pool"]["protected_tokens"] == 0


def test_stats_and_variants(empty, tokenizer, passages):
    a, b = passages.several(2)
    before = empty.rank()
    prime(empty, [a, b], extra_key="me")
    reply = generated(empty.generate(marked([b, a], head="Both. ").text, extra_key="me"))
    rank = empty.rank()
    assert (before["index"]["num_variants"], before["tiers"]["pool"]["tokens"]) == (0, 0)
    assert rank["index"]["num_variants"] == rank["tiers"]["pool"]["variants"] == 2
    lengths = [len(chunk_ids(tokenizer, text)) for text in (a, b)]
    pool = rank["tiers"]["pool"]
    assert pool["tokens"] == sum(lengths)
    assert pool["bytes"] == pool["tokens"] * pool["capacity_bytes"] // pool["capacity_tokens"]
    assert pool["capacity_bytes"] == MAX_TOTAL_TOKENS * 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head size, fp32
    assert pool["capacity_tokens"] == MAX_TOTAL_TOKENS
    assert pool["free_tokens"] + pool["evictable_tokens"] + pool["protected_tokens"] == MAX_TOTAL_TOKENS
    assert rank["rss_bytes"] > 10**8
    assert (rank["tp_rank"], rank["num_flushes"]) == (0, before["num_flushes"])
    config = empty.stats()["config"]
    assert (config["method"], config["separator"], config["max_variants_per_chunk"]) == ("near-words", SEP, 8)

    listing = empty.get("/chunk_cache/variants").json()
    assert (listing["total"], listing["limit"], listing["offset"]) == (2, 100, 0)
    first, second = listing["variants"]
    assert [first["length"], second["length"]] == [first["stored_tokens"], second["stored_tokens"]] == lengths
    assert [second["id"], first["id"]] == [chunk["variant"] for chunk in reply["chunks"]]
    assert (first["generation"], first["num_uses"], first["pinned_until"]) == (0, 1, None)
    assert first["where"]["tier"] == "pool"
    assert first["where"]["home"] == "path"
    assert empty.get("/chunk_cache/variants?limit=1&offset=1").json()["variants"] == [second]
    of_one = empty.get(f"/chunk_cache/variants?key={first['key']}").json()
    (described,) = of_one["variants"]
    assert described == {**first, "system": described["system"], "context": []}
    assert (bool(described["system"]), of_one["tiers"]) == (True, {})


def test_variants_have_the_last_ids_that_clients_gave(empty, passages):
    texts = passages.several(2)

    def ids(*given: str | None) -> list[str | None]:
        empty.generate(marked(texts).text, chunk_cache={"chunk_ids": list(given)} if given else None, extra_key="me")
        listed = empty.get("/chunk_cache/variants?order=uses").json()["variants"]
        return [one["chunk_id"] for one in sorted(listed, key=lambda one: one["start"])]

    assert ids() == [None, None]
    assert ids("Paris", None) == ["Paris", None]
    assert ids("Lutetia", "Rome") == ids() == ["Lutetia", "Rome"]
    empty.ask("flush", timeout_s=10)
    empty.generate(marked(texts).text)
    (first, _) = empty.get("/chunk_cache/variants").json()["variants"]
    assert first["chunk_id"] is None, "what another partition calls it is not told"
    empty.generate(marked(texts).text, chunk_cache={"chunk_ids": ["Paris", None]})
    empty.ask("evict", texts=texts)
    empty.generate(marked(texts).text)
    assert [one["chunk_id"] for one in empty.get("/chunk_cache/variants").json()["variants"]] == [None, None]


# Pins.


def test_a_pin_protects_under_pressure_and_ends_with_its_time(empty, passages):
    pinned, other = passages.several(2)
    prime(empty, [pinned, other])
    reply = empty.ask("pin", texts=[pinned, passages()], ttl_s=60)
    (entry,) = reply["pinned"]
    assert (entry["index"], [e["index"] for e in reply["not_stored"]]) == (0, [1])
    assert entry["tokens"] <= reply["pinned_tokens"] <= entry["tokens"] + 10, "the words in front, not the question"
    assert reply["max_pinned_tokens"] == MAX_TOTAL_TOKENS // 2
    fill(empty, 2 * MAX_TOTAL_TOKENS, passages)
    assert empty.stored_tokens(entry["key"]) == entry["tokens"]
    assert statuses(generated(empty.generate(marked([pinned], head="Now. ").text))) == ["hit"]
    assert statuses(generated(empty.generate(marked([other], head="Now. ").text))) == ["miss"]
    # Of two ends the later one counts; the rest is over soon.
    assert empty.ask("pin", texts=[pinned], ttl_s=0.5)["pinned"]
    assert empty.ask("pin", texts=[other], ttl_s=0.5)["pinned"]
    time.sleep(1.5)
    variants = {v["key"]: v for v in empty.get("/chunk_cache/variants").json()["variants"]}
    assert [key for key, v in variants.items() if v["pinned_until"] is not None] == [entry["key"]]
    assert empty.ask("unpin", texts=[pinned, other])["unpinned"][0]["key"] == entry["key"]
    assert empty.rank()["pins"]["num_tokens"] == empty.rank()["tiers"]["pool"]["protected_tokens"] == 0
    fill(empty, 2 * MAX_TOTAL_TOKENS, passages)
    assert empty.stored_tokens(entry["key"]) == 0


def test_a_pin_expires_by_itself(empty, passages):
    chunk = passages()
    prime(empty, [chunk])
    (entry,) = empty.ask("pin", texts=[chunk], ttl_s=1)["pinned"]
    assert empty.rank()["tiers"]["pool"]["protected_tokens"] > 0
    time.sleep(2)
    assert empty.rank()["pins"]["num_pins"] == empty.rank()["tiers"]["pool"]["protected_tokens"] == 0
    fill(empty, 2 * MAX_TOTAL_TOKENS, passages)
    assert empty.stored_tokens(entry["key"]) == 0


def test_no_more_than_half_of_the_pool_is_pinned(empty, passages):
    chunks = passages.several(4, num_words=450)
    prime(empty, chunks[:3])
    empty.ask("pin", texts=chunks[:1], ttl_s=60)
    before = empty.rank()["pins"]
    response = empty.post("/chunk_cache/pin", {"texts": chunks[:3], "ttl_s": 60}, check=False)
    assert response.status_code == 409
    error = response.json()["error"]
    assert error["pinned_tokens"] > error["max_pinned_tokens"] == MAX_TOTAL_TOKENS // 2
    assert str(error["max_pinned_tokens"]) in error["message"]
    assert empty.rank()["pins"] == before
    assert before["num_tokens"] == empty.rank()["tiers"]["pool"]["protected_tokens"]
    assert len(empty.ask("unpin", all=True)["unpinned"]) == 1


def test_a_pin_follows_a_chunk_that_gets_a_node_of_its_own(empty, passages):
    chunk, tail = passages(), passages(300)
    empty.generate(marked([passages(200), chunk, tail]).text, max_new_tokens=1)
    (entry,) = empty.ask("pin", texts=[chunk], ttl_s=60)["pinned"]
    for i in range(9):  # promote_uses
        empty.generate(marked([chunk], head=f"{i} ").text, max_new_tokens=1)
    fill(empty, 2 * MAX_TOTAL_TOKENS, passages)
    (variant,) = empty.get(f"/chunk_cache/variants?key={entry['key']}").json()["variants"]
    assert (variant["where"]["home"], variant["stored_tokens"]) == ("node", entry["tokens"])
    assert empty.rank()["pins"]["num_tokens"] == entry["tokens"], "the cold prompt is let go"
    empty.ask("unpin", keys=[entry["key"]])
    assert empty.rank()["tiers"]["pool"]["protected_tokens"] == 0


# Forgetting.


def test_evict_forgets_a_chunk_and_frees_its_node(empty, passages):
    a, b = passages.several(2)
    prime(empty, [a])
    empty.generate(marked([a, b], head="Derived. ").text)  # b becomes a node of its own
    by_home = {v["where"]["home"]: v for v in empty.get("/chunk_cache/variants").json()["variants"]}
    empty.ask("pin", keys=[by_home["node"]["key"]], ttl_s=60)
    free = empty.rank()["tiers"]["pool"]["free_tokens"]
    reply = empty.ask("evict", texts=[a, b, "never seen"])
    assert [entry["freed_tokens"] for entry in reply["evicted"]] == [0, by_home["node"]["length"]]
    assert [entry["index"] for entry in reply["not_stored"]] == [2]
    assert empty.rank()["tiers"]["pool"]["free_tokens"] == free + by_home["node"]["length"]
    assert empty.rank()["pins"]["num_pins"] == empty.rank()["tiers"]["pool"]["protected_tokens"] == 0
    assert statuses(generated(empty.generate(marked([b, a], head="Again. ").text))) == ["miss", "miss"]


def test_evict_while_requests_run(empty, passages):
    chunks = passages.several(6)
    prime(empty, chunks)

    def ask(i: int) -> None:
        order = chunks[i % 6 :] + chunks[: i % 6]
        generated(empty.generate(marked(order, head=f"{i} ").text, max_new_tokens=4))

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, i) for i in range(24)]
        for i in range(12):
            empty.ask("evict", texts=[chunks[i % 6]])
            empty.ask("pin", texts=chunks, ttl_s=1)
        for future in futures:
            future.result()
    empty.ask("unpin", all=True)
    assert empty.rank()["tiers"]["pool"]["protected_tokens"] == 0


def test_flush_drops_pins_and_is_refused_while_busy(empty, passages):
    chunk = passages()
    prime(empty, [chunk])
    assert empty.ask("pin", texts=[chunk], ttl_s=60)["pinned"]
    flushes = empty.rank()["num_flushes"]
    thread = threading.Thread(target=lambda: empty.generate("The road.", max_new_tokens=600))
    thread.start()
    time.sleep(0.5)
    status, message = empty.refuse("flush", {})
    assert status == 409, message
    assert "idle" in message
    assert empty.rank()["pins"]["num_pins"] == 1
    thread.join()
    assert empty.ask("flush", timeout_s=10) == {"flushed": True}
    rank = empty.rank()
    assert rank["num_flushes"] == flushes + 1
    assert (rank["pins"]["num_pins"], rank["index"]["num_variants"]) == (0, 0)
    assert rank["tiers"]["pool"]["free_tokens"] == MAX_TOTAL_TOKENS
    prime(empty, [chunk])
    empty.flush()  # SGLang's own route does the same
    assert empty.rank()["index"]["num_variants"] == 0


# Warming.


def test_warm_then_a_request_hits(empty, tokenizer, passages):
    chunks = passages.several(5)
    prime(empty, chunks[:1])  # as a prompt leaves it, which is not what is asked for
    texts = [*chunks, chunks[1], "", f"a{SEP}b", "word " * 9000]
    *progress, summary = empty.warm(texts=texts, batch=2, prefix_text="Read.\n")
    assert [line["done"] for line in progress] == [2, 4, 6, 8, 9]
    failed = [entry["index"] for line in progress for entry in line["failed"]]
    assert failed == [entry["index"] for entry in summary["failed"]] == [6, 7, 8]
    assert summary["failed"][2]["error"].startswith("texts[8]: ")
    assert (summary["stored"], summary["already"], summary["total"], summary["present"]) == (5, 1, 9, 6)
    assert summary["behind"] == "filler"
    out = empty.generate(marked(chunks[::-1], head="Look here. ").text)
    assert statuses(generated(out)) == ["hit"] * 5
    assert {chunk["kind"] for chunk in generated(out)["chunks"]} == {"prepared"}
    *_, summary = empty.warm(texts=chunks, prefix_text="Read.\n")
    assert (summary["stored"], summary["already"], summary["computed_tokens"]) == (0, 5, 0)
    *_, summary = empty.warm(texts=chunks, prefix_text="Answer.\n")
    assert (summary["stored"], summary["already"]) == (5, 0), "another system prompt has variants of its own"
    *_, summary = empty.warm(texts=chunks[2:3], prefix_text="Read.\n", alone=True)
    assert (summary["stored"], summary["behind"]) == (1, "nothing")
    head = generated(empty.generate(marked(chunks[2:3], head="Read.\n").text))
    assert statuses(head) == ["prefix"], "the prefix is that of a prompt, BOS included"


def test_warming_in_a_full_pool_evicts_no_more_than_it_needs(empty, passages):
    chunks = passages.several(40)
    for prefix in ("Read.\n", "Answer.\n"):
        *_, summary = empty.warm(texts=chunks, prefix_text=prefix)
        assert (summary["stored"], summary["present"], summary["failed"]) == (40, 40, [])
    assert empty.rank()["tiers"]["pool"]["free_tokens"] < 200


def test_warm_by_ids_and_in_a_partition(empty, tokenizer, passages):
    a, b = passages.several(2)
    ids = [chunk_ids(tokenizer, text) for text in (a, b)]
    lines = empty.warm(input_ids=ids, prefix_ids=[tokenizer.bos_token_id], cache_salt="salt")
    assert lines[-1]["stored"] == 2
    prompt = marked([b, a], head="There. ").text
    assert statuses(generated(empty.generate(prompt, max_new_tokens=1))) == ["miss", "miss"]
    assert statuses(generated(empty.generate(prompt, max_new_tokens=1, cache_salt="salt"))) == ["hit", "hit"]


def test_chunks_are_prepared_behind_similar_ones(empty, passages):
    chunks = [f"{passages(50)} about {word}.\n" for word in ("cats", "cats", "dogs", "dogs", "cats and dogs")]
    (estimate,) = empty.warm(texts=chunks, neighbours=2, prefix_text="Read.\n", dry_run=True)
    assert (len(estimate["prepared"]), estimate["already"]) == (5, 0)
    assert empty.rank()["index"]["num_variants"] == 0
    *_, summary = empty.warm(texts=chunks, neighbours=2, prefix_text="Read.\n", batch=3)
    assert (summary["stored"], summary["already"], summary["failed"], summary["present"]) == (5, 0, [], 5)
    assert summary["computed_tokens"] == estimate["computed_tokens"]
    listed = empty.get("/chunk_cache/variants").json()["variants"]
    prepared = {variant["key"]: variant["neighbours"] for variant in listed if variant["neighbours"]}
    exact = {variant["key"] for variant in listed if not variant["neighbours"]}
    assert len(prepared) == 5
    assert {key for keys in prepared.values() for key in keys} == exact, (
        "neighbours, and nothing else, are stored alone"
    )
    assert len(exact) == len(estimate["exact"])
    assert all(len(keys) == 2 and key not in keys for key, keys in prepared.items())
    assert {variant["generation"] for variant in listed if variant["neighbours"]} == {1}
    *_, summary = empty.warm(texts=chunks, neighbours=2, prefix_text="Read.\n")
    assert (summary["stored"], summary["already"], summary["computed_tokens"]) == (0, 5, 0)
    # Another corpus: only what has other neighbours is computed.
    near = [[1, 2], [0, 2], [3], [2], [0, 1]]
    empty.warm(texts=chunks, neighbours=near, prefix_text="Read.\n")
    *_, summary = empty.warm(texts=chunks, neighbours=[*near[:4], [1, 0]], prefix_text="Read.\n")
    assert (summary["stored"], summary["already"]) == (1, 4)


def test_a_prepared_chunk_is_used_where_there_is_no_exact_one(empty, passages):
    a, b, c = passages.several(3)
    *_, summary = empty.warm(texts=[c, a, b], neighbours=[[1, 2]], prefix_text="Read.\n")
    assert (summary["stored"], summary["total"]) == (1, 1)
    reply = generated(empty.generate(marked([b, c], head="There. ").text, max_new_tokens=1))
    assert [chunk.get("kind") == "prepared" for chunk in reply["chunks"]] == [False, True]
    assert statuses(reply) == ["hit", "hit"]


def test_what_cannot_be_prepared_fails_alone_or_is_refused(empty, passages):
    a, b = passages.several(2)
    texts = [a, b, f"x{SEP}y", "word " * 9000, a, b, a]
    near = [[1], [2], [0], [0], [1, 0], [3], []]
    *_, summary = empty.warm(texts=texts, neighbours=near, prefix_text="Read.\n")
    assert (summary["stored"], summary["already"]) == (1, 1), "a, and a again: it is no neighbour of itself"
    errors = {entry["index"]: entry["error"] for entry in summary["failed"]}
    assert errors.keys() == {1, 2, 3, 5, 6}
    assert errors[1].startswith("neighbours[1][0]: texts[2]: has a separator")
    assert errors[2].startswith("texts[2]: has a separator")
    assert errors[3].startswith("texts[3]: ")
    assert errors[5].startswith("texts[5]: neighbour 0 (texts[3]): ")
    assert errors[6].startswith("neighbours[6]: texts[6] has the tokens of texts[0], which has other neighbours; ")
    for body, start in (
        ({"texts": [a, b], "neighbours": [[7]]}, "neighbours[0][0]: 7 is none of the 2 chunks"),
        ({"texts": [a, b], "neighbours": 99}, "neighbours: 99 is not a legal number"),
        ({"texts": [a, b], "neighbours": 1, "retriever": "/none"}, "retriever: the server does not load '/none'"),
    ):
        status, message = empty.refuse("warm", body)
        assert (status, message.startswith(start)) == (400, True), message


def test_the_command_prepares_a_corpus(empty, passages, tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = passages.several(4)
    lines = [{"text": text, "neighbours": [1 + (i + 1) % 4]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"text": "x", "neighbours": [9]}\n')
    command = [sys.executable, "-m", "sglang_chunk_cache.warm", str(path), "--url", empty.url, "--api-key", KEY]

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=300)

    dry = run("--neighbours", "file", "--dry-run")
    assert "4 chunks to compute, 4 behind their neighbours, 0 already there, 1 failed" in dry.stdout, dry.stderr
    done = run("--neighbours", "file")
    assert (done.returncode, "5 lines: 4 stored, 0 already there, 1 failed" in done.stdout) == (1, True), done
    assert "corpus.jsonl:5: neighbours[0]: 9 is no line of the file" in done.stderr
    assert "4 already there" in run("--neighbours", "file", "--fresh").stdout
    found = run("--neighbours", "2", "--fresh")
    assert "5 lines: 5 stored" in found.stdout, found.stderr


def test_warming_stops_where_the_client_goes(empty, passages):
    chunks = passages.several(400, num_words=60)
    with empty.client.http.stream("POST", "/chunk_cache/warm", json={"texts": chunks, "batch": 1}) as response:
        next(response.iter_lines())
    time.sleep(1.5)
    added = empty.rank()["index"]["num_added"]
    time.sleep(1.5)
    assert empty.rank()["index"]["num_added"] == added
    assert empty.ask("flush", timeout_s=10) == {"flushed": True}, "nothing is left running"


# The command.


def run_command(server: AdminServer, corpus: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_chunk_cache.warm", str(corpus), "--url", server.url, *flags],
        env={**os.environ, "CHUNK_CACHE_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_runs_twice(empty, tmp_path, passages):
    chunks = passages.several(12)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"passage": chunk}) + "\n" for chunk in chunks))
    first = run_command(empty, corpus, "--field", "passage", "--batch", "4")
    assert first.returncode == 0, first.stderr
    assert "12 lines: 12 stored, 0 already there, 0 failed" in first.stdout
    assert statuses(generated(empty.generate(marked(chunks[:3], head="Well. ").text))) == ["hit"] * 3
    lookups = empty.rank()["index"]
    second = run_command(empty, corpus, "--field", "passage", "--batch", "4")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert empty.rank()["index"] == lookups, "nothing was asked of the server"
    empty.ask("flush")
    third = run_command(empty, corpus, "--field", "passage", "--batch", "4")
    assert "12 stored" in third.stdout
    assert "beginning again" in third.stderr
    with corpus.open("a") as file:
        file.write("nonsense\n")
    fourth = run_command(empty, corpus, "--field", "passage")
    assert fourth.returncode == 1
    assert "0 stored, 12 already there, 1 failed" in fourth.stdout
    assert "corpus.jsonl:13: not JSON" in fourth.stderr


def test_the_command_goes_on_after_a_kill(empty, tmp_path, passages):
    chunks = passages.several(100)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": chunk}) + "\n" for chunk in chunks))
    state = tmp_path / "state"
    flags = ("--batch", "1", "--state", str(state))
    command = [sys.executable, "-m", "sglang_chunk_cache.warm", str(corpus), "--url", empty.url, *flags]
    before = num_added(empty)
    process = subprocess.Popen(command, env={**os.environ, "CHUNK_CACHE_API_KEY": KEY}, stderr=subprocess.DEVNULL)
    while not state.exists() or json.loads(state.read_text())["line"] < 10:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = json.loads(state.read_text())["line"]
    assert 10 <= done < 100
    computed = num_added_at_rest(empty) - before
    assert computed < 100, "a job whose client is gone stops"
    second = run_command(empty, corpus, *flags)
    assert second.returncode == 0, second.stderr
    stored, already = (int(second.stdout.split()[i]) for i in (2, 4))
    assert stored + already == 100
    assert already == computed - done, "what was stored after the last line of the state is found, not computed again"
    assert num_added(empty) - before == 100


def num_added(server):
    return server.rank()["index"]["num_added"]


def num_added_at_rest(server):
    """Number of chunks added, when a second has passed in which none was."""
    last, now = None, num_added(server)
    while now != last:
        time.sleep(1)
        last, now = now, num_added(server)
    return now


def test_the_pool_is_whole_at_the_end(empty):
    pool = empty.rank()["tiers"]["pool"]
    assert (pool["protected_tokens"], pool["free_tokens"]) == (0, MAX_TOTAL_TOKENS)
    empty.generate("The end.", max_new_tokens=2)
    time.sleep(1)
    assert empty.alive()
    assert "leak" not in empty.log.lower().replace("memory leak check", "")


# Tensor parallelism.


@pytest.mark.all
def test_two_ranks_do_the_same(model_dir, passages):
    env = {**STRICT, "SGLANG_USE_PICKLE_IPC": "0"}
    flags = ("--enable-metrics", "--chunk-cache", "--api-key", KEY, "--tp-size", "2")
    with AdminServer(model_dir, *FLAGS, *flags, env=env) as server:
        chunks = passages.several(3)
        assert server.warm(texts=chunks)[-1]["stored"] == 3
        (entry,) = server.ask("pin", texts=chunks[:1], ttl_s=3)["pinned"]
        fill(server, 2 * MAX_TOTAL_TOKENS, passages)
        assert server.stored_tokens(entry["key"]) == entry["tokens"]
        named = {"chunk_ids": ["Paris"]}
        assert statuses(generated(server.generate(marked(chunks[:1], head="Now. ").text, chunk_cache=named))) == ["hit"]
        listed = server.get(f"/chunk_cache/variants?key={entry['key']}").json()["variants"]
        assert {variant["chunk_id"] for variant in listed} == {"Paris"}
        time.sleep(4)
        first, second = server.stats()["ranks"]
        assert [first["tp_rank"], second["tp_rank"]] == [0, 1]
        assert first["pid"] != second["pid"]
        for name in ("index", "tiers", "pins", "num_flushes"):
            assert first[name] == second[name]
        assert first["pins"]["num_pins"] == 0
        assert server.ask("evict", texts=chunks)["evicted"]
        assert server.ask("flush") == {"flushed": True}
        assert server.alive()
