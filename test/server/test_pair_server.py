"""A prefill server with chunks, a stock decode server and the gateway in front: what clients get, and what is left.

Answers are those that one server gives, with chunks and without; that server is gone before the pair is started.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import find_gateway
from pair import Pair
from server.conftest import FLAGS, STRICT
from server.contract import FULL, Marked, Passages, generated, marked, metric, same_logprobs, statuses
from server.tier_contract import wait_until
from server_fixture import Server
from unit.tiers.mooncake_master import library_env

pytestmark = [pytest.mark.all, pytest.mark.server]

SMALL_STEPS = ("--chunked-prefill-size", "64")


@dataclass(frozen=True)
class Mode:
    """Flags of both servers and of each, options of `--chunk-cache-config`, variables; FOLDER is an empty folder."""

    both: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ("--enable-metrics",)
    decode: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


MODES = {
    "overlap": Mode(
        SMALL_STEPS,
        ("--enable-metrics", "--chunk-cache-discover"),
        env={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20"},
    ),
    "normal": Mode((*SMALL_STEPS, "--disable-overlap-schedule"), config={"refresh_uses": 2, "verify_share": 1.0}),
    "pages": Mode(
        ("--page-size", "16"),
        config={"tiers": {"controller": False, "disk": {"path": "FOLDER", "max_bytes": "100MB"}}},
    ),
    "early": Mode(  # computed before the decode server has room, half of them once more
        SMALL_STEPS,
        ("--enable-metrics", "--optimistic-prefill-attempts", "2"),
        env={"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"},
    ),
    "keeps": Mode(decode=("--disaggregation-decode-enable-radix-cache",)),
}
WHERE_ALL_WORKS = ("overlap", "normal", "pages", "early")
in_all_modes = pytest.mark.parametrize("pair", WHERE_ALL_WORKS, indirect=True)
REUSE = {"ratio": 0.0}
NUM_TOKENS = 8


@dataclass(frozen=True)
class Round:
    """Prompts that are sent at once, with these options, and how many of their tokens come from chunks at least."""

    prompts: tuple[Marked, ...]
    options: dict[str, Any]
    reused: int


def rounds(name: str, options: dict[str, Any]) -> list[Round]:
    """Misses, hits, several at once, a prompt that was there, more than a step has room for."""
    texts = Passages(name).several(8)
    a, b, c, d, e, f, g, h = texts
    long = "How does it end, and who is it that " + "comes along the old road and " * 8 + "stays?"
    return [
        Round((marked([a, b, c]),), options, 0),
        Round((marked([c, a], question="Where?"),), options, 2),
        Round((marked([b, c, a]), marked([d, a]), marked([e], question=long), marked([a, f, b])), options, 4),
        Round((marked([b, c, a]),), options, 0),
        Round((marked([g, e, d, c, b, a, f], question=long), marked([c, h, b], question=long)), options, 6),
        Round(tuple(marked(random.Random(seed).sample(texts, 3), question=long) for seed in range(6)), options, 8),
    ]


def body(prompt: Marked, tokenizer: Any, options: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """A request of token ids, which a stock server reads alike."""
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    if options is not None:
        params["custom_params"] = {"chunk_cache": {"spans": prompt.spans(tokenizer), **options}}
    logprobs = {"return_logprob": True, "top_logprobs_num": 5}
    return {"input_ids": prompt.ids(tokenizer), "sampling_params": params, **logprobs, **fields}


def ask(http: httpx.Client, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers to requests that are sent at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(pool.map(lambda one: http.post("/generate", json=one), bodies))
    assert [reply.status_code for reply in replies] == [200] * len(bodies), [reply.text for reply in replies]
    return [reply.json() for reply in replies]


class Expected:
    """What one server answers, asked before there is a pair."""

    def __init__(self, model_dir: Path, tokenizer: Any) -> None:
        self.exact = self._ask(model_dir, tokenizer, rounds("exact", FULL), (), is_ours=False)
        self.reused = self._ask(model_dir, tokenizer, rounds("reused", REUSE), ("--chunk-cache",), is_ours=True)

    @staticmethod
    def _ask(
        model_dir: Path, tokenizer: Any, asked: list[Round], flags: tuple[str, ...], *, is_ours: bool
    ) -> list[list[Any]]:
        with Server(model_dir, *FLAGS, *flags) as server:
            return [
                ask(
                    server.client.http,
                    [body(one, tokenizer, each.options if is_ours else None) for one in each.prompts],
                )
                for each in asked
            ]


@pytest.fixture(scope="module")
def expected(model_dir: Path, tokenizer: Any) -> Expected:
    if find_gateway() is None:
        pytest.skip("no gateway here (make gateway)")
    if find_spec("mooncake") is None:
        pytest.skip("no Mooncake here (make mooncake)")
    return Expected(model_dir, tokenizer)


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, model_dir: Path, expected: Expected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    mode = MODES[request.param]
    config = json.dumps(mode.config).replace("FOLDER", str(tmp_path_factory.mktemp("tier")))
    with Pair(
        model_dir,
        *FLAGS,
        *mode.both,
        prefill_flags=(*mode.prefill, "--chunk-cache-config", config),
        decode_flags=mode.decode,
        env={**STRICT, **library_env(), **mode.env},
    ) as pair:
        yield pair


@pytest.fixture(autouse=True)
def nothing_left(pair: Pair) -> Iterator[None]:
    """Both servers live and are idle again, which is when they look for leaks; a flush is done when nobody waits."""
    yield
    for server in (pair.prefill, pair.decode):
        flush(server)
        time.sleep(0.5)  # idle steps
        assert server.alive(), server.log[-3000:]


def flush(server: Server) -> None:
    wait_until(lambda: server.post("/flush_cache", {}, check=False).status_code == 200, "it is not idle", 90)


def reused_by(pair: Pair, rid: str) -> int:
    """Tokens from chunks in a request, as the prefill server tells."""
    told = pair.prefill.get("/chunk_cache/requests").json()["requests"]
    return next(one["reused_tokens"] for one in told if one["id"] == rid)


def run(pair: Pair, tokenizer: Any, asked: list[Round], answers: list[list[Any]], name: str) -> None:
    for number, (each, wanted) in enumerate(zip(asked, answers, strict=True)):
        rids = [f"{name}-{number}-{i}" for i in range(len(each.prompts))]
        bodies = [body(one, tokenizer, each.options, rid=rid) for one, rid in zip(each.prompts, rids, strict=True)]
        for got, want in zip(ask(pair.http, bodies), wanted, strict=True):
            same_logprobs(got, want)
        reused = sum(reused_by(pair, rid) for rid in rids)
        assert reused >= 30 * each.reused, (number, reused)


@in_all_modes
def test_full_recomputation_is_stock(pair: Pair, tokenizer: Any, expected: Expected):
    run(pair, tokenizer, rounds("exact", FULL), expected.exact, "exact")


@pytest.mark.parametrize("pair", ["overlap", "normal", "early"], indirect=True)
def test_fused_prompts_arrive_as_they_were_computed(pair: Pair, tokenizer: Any, expected: Expected):
    """Without any recomputation the answer is another one than stock's, and that of one server."""
    run(pair, tokenizer, rounds("reused", REUSE), expected.reused, "reused")


@in_all_modes
def test_aborts_at_any_time(pair: Pair, tokenizer: Any, passages: Passages):
    """Clients that leave, and requests that are aborted on both servers, while prompts are computed and sent."""
    texts, rng = passages.several(6), random.Random(7)
    prompts = [marked(rng.sample(texts, 4), question="Why? " * 60) for _ in range(24)]

    def abort(rid: str) -> None:
        for server in rng.sample((pair.prefill, pair.decode), 2):
            server.post("/abort_request", {"rid": rid})

    def leave(index: int) -> None:
        one = body(prompts[index], tokenizer, REUSE, rid=f"abort-{index}")
        one["sampling_params"]["max_new_tokens"] = 60
        wait_s = rng.uniform(0.0, 1.5)
        if index % 3 == 0:
            with suppress(httpx.ReadTimeout):
                pair.http.post("/generate", json=one, timeout=httpx.Timeout(90, read=0.01 + wait_s))
            return
        timer = threading.Timer(wait_s, abort, (f"abort-{index}",))
        timer.start()
        pair.http.post("/generate", json=one)
        timer.join()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(len(prompts))))
    out = ask(pair.http, [body(prompts[0], tokenizer, FULL)])
    assert len(out[0]["output_ids"]) == NUM_TOKENS


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
def test_marked_text_is_refused(pair: Pair, passages: Passages):
    """The decode server would read the separators."""
    text = marked([passages()]).text
    params = {"max_new_tokens": 4}
    for path, request in {
        "/generate": {"text": text, "sampling_params": params},
        "/v1/completions": {"model": "default", "prompt": text, "max_tokens": 4},
        "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }.items():
        reply = pair.http.post(path, json=request)
        assert reply.status_code == 400, (path, reply.text)
        assert "the decode server reads the request too" in reply.text, (path, reply.text)


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
def test_a_prefill_server_answers_where_nobody_decodes(pair: Pair, tokenizer: Any, passages: Passages):
    first, second = passages.several(2)
    alone = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    pair.prefill.post("/generate", body(marked([first, second]), tokenizer, FULL, **alone))
    prompt = marked([second, first])
    response = pair.prefill.post("/generate", body(prompt, tokenizer, FULL, **alone))
    reply = generated(response.json(), prompt.spans(tokenizer))
    assert statuses(reply) == ["hit", "hit"]
    assert response.headers["x-chunk-cache"]
    (decoded,) = ask(pair.http, [body(prompt, tokenizer, FULL)])
    assert response.json()["output_ids"] == decoded["output_ids"][:1]
    assert "chunk_cache" not in decoded["meta_info"]
    refused = pair.prefill.post("/generate", body(prompt, tokenizer, FULL), check=False)
    assert refused.status_code == 400
    assert "without bootstrap room" in refused.text


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
def test_passages_without_marks(pair: Pair, tokenizer: Any, passages: Passages):
    """Both servers tokenize the text alike."""
    chunks = passages.several(3, num_words=40)
    ask(pair.http, [body(marked(chunks), tokenizer, FULL)])
    request = {
        **body(marked([]), tokenizer, None, rid="without-marks"),
        "text": marked(chunks[::-1], head="So. ").plain,
    }
    del request["input_ids"]
    (out,) = ask(pair.http, [request])
    assert len(out["output_ids"]) == NUM_TOKENS
    assert reused_by(pair, "without-marks") > 200


@pytest.mark.parametrize("pair", ["normal"], indirect=True)
def test_what_the_prefill_server_does_by_itself(pair: Pair, tokenizer: Any, passages: Passages):
    """Chunks are warmed, a derived one is computed exactly, replies are verified: nobody waits for their KV."""
    warmed, derived = passages.several(2)

    def num_refreshed() -> float:
        return metric(pair.prefill, "maintenance_total", kind="refreshed")

    def num_verified() -> float:
        return metric(pair.prefill, "verifications_total", outcome="verified")

    refreshed, verified = num_refreshed(), num_verified()
    summary = pair.prefill.post("/chunk_cache/warm", {"texts": [warmed]}).text.splitlines()[-1]
    assert json.loads(summary)["stored"] == 1
    heads = ("One. ", "Two. ", "Three. ")
    for i, head in enumerate(heads):
        chunks = [warmed, derived] if i == 0 else [derived]
        ask(pair.http, [body(marked(chunks, head=head), tokenizer, REUSE, rid=f"itself-{i}")])
        assert reused_by(pair, f"itself-{i}") > 30
    wait_until(lambda: num_refreshed() > refreshed, "not refreshed")
    wait_until(lambda: num_verified() >= verified + len(heads), "not verified")


@pytest.mark.parametrize("pair", ["pages"], indirect=True)
def test_chunks_come_from_tiers(pair: Pair, tokenizer: Any, passages: Passages, model_dir: Path):
    chunks = passages.several(3, num_words=40)
    ask(pair.http, [body(marked(chunks), tokenizer, FULL)])
    wait_until(lambda: metric(pair.prefill, "tier_writes_total", tier="disk", outcome="ok") >= 3, "not written")
    flush(pair.prefill)
    prompt = marked(chunks[::-1], head="Again. ")
    (plain,) = ask(pair.http, [body(prompt, tokenizer, None)])
    flush(pair.prefill)
    (out,) = ask(pair.http, [body(prompt, tokenizer, FULL, rid="from-tiers")])
    same_logprobs(out, plain)
    assert reused_by(pair, "from-tiers") > 200


@pytest.mark.parametrize("pair", ["keeps"], indirect=True)
def test_a_decode_server_that_keeps_prefixes(pair: Pair, tokenizer: Any, passages: Passages):
    """It would decode other prompts over KV of a fused one, so whatever it has a prefix of fails at once."""
    prompt = marked(passages.several(2))
    ask(pair.http, [body(prompt, tokenizer, FULL)])
    reply = pair.http.post("/generate", json=body(prompt, tokenizer, None))
    assert reply.status_code == 500, reply.text
    assert "start it without --disaggregation-decode-enable-radix-cache" in pair.prefill.log


@pytest.mark.parametrize("pair", ["overlap"], indirect=True)
def test_a_decode_server_that_dies(pair: Pair, tokenizer: Any, passages: Passages):
    """The prefill server gives back all that it was sending, and serves the next one."""
    texts, rng = passages.several(6), random.Random(3)
    bodies = [body(marked(rng.sample(texts, 4), question="Why? " * 60), tokenizer, REUSE) for _ in range(12)]

    def send(one: dict[str, Any]) -> None:
        with suppress(httpx.TransportError):
            pair.http.post("/generate", json=one)

    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(send, one) for one in bodies]
        wait_until(lambda: any(one.done() for one in sent), "nothing was answered")
        os.killpg(pair.decode.pid, signal.SIGKILL)
    flush(pair.prefill)
    pair.decode.start()
