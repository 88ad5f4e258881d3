"""A prefill server with chunks, a stock decode server and the gateway in front: what clients get, and what is left.

Answers are those that one server gives, with chunks and without; that server is gone before the pair is started.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import find_gateway
from pair import Pair
from server.conftest import FLAGS, STRICT
from server.contract import FULL, Marked, Passages, marked, same_logprobs
from server_fixture import Server
from unit.tiers.mooncake_master import library_env

pytestmark = [pytest.mark.all, pytest.mark.server]

MODES = {
    "overlap": ("--chunked-prefill-size", "64"),
    "normal": ("--chunked-prefill-size", "64", "--disable-overlap-schedule"),
    "pages": ("--page-size", "16"),
}
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


@pytest.fixture(scope="module", params=MODES)
def pair(request: pytest.FixtureRequest, model_dir: Path, expected: Expected) -> Iterator[Pair]:
    flags = (*FLAGS, *MODES[request.param])
    with Pair(model_dir, *flags, env={**STRICT, **library_env()}) as pair:
        yield pair


@pytest.fixture(autouse=True)
def nothing_left(pair: Pair) -> Iterator[None]:
    """Both servers live and are idle again, which is when they look for leaks; a flush is done when nobody waits."""
    yield
    for server in (pair.prefill, pair.decode):
        deadline = time.monotonic() + 30
        while server.post("/flush_cache", {}, check=False).status_code != 200:
            assert server.alive(), server.log[-3000:]
            assert time.monotonic() < deadline, "it is not idle"
            time.sleep(0.2)
        time.sleep(0.5)  # idle steps
        assert server.alive(), server.log[-3000:]


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


def test_full_recomputation_is_stock(pair: Pair, tokenizer: Any, expected: Expected):
    run(pair, tokenizer, rounds("exact", FULL), expected.exact, "exact")


def test_fused_prompts_arrive_as_they_were_computed(pair: Pair, tokenizer: Any, expected: Expected):
    """Without any recomputation the answer is another one than stock's, and that of one server."""
    run(pair, tokenizer, rounds("reused", REUSE), expected.reused, "reused")


def test_aborts_at_any_time(pair: Pair, tokenizer: Any, passages: Passages):
    """Clients that leave, and requests that are aborted on either server, while prompts are computed and sent."""
    texts, rng = passages.several(6), random.Random(7)
    prompts = [marked(rng.sample(texts, 4), question="Why? " * 60) for _ in range(24)]

    def leave(index: int) -> None:
        one = body(prompts[index], tokenizer, REUSE, rid=f"abort-{index}")
        one["sampling_params"]["max_new_tokens"] = 60
        wait_s = rng.uniform(0.0, 1.5)
        if index % 3 == 0:
            with suppress(httpx.ReadTimeout):
                pair.http.post("/generate", json=one, timeout=httpx.Timeout(90, read=0.01 + wait_s))
            return
        server = (pair.prefill, pair.decode)[index % 2]
        timer = threading.Timer(wait_s, lambda: server.post("/abort_request", {"rid": f"abort-{index}"}))
        timer.start()
        pair.http.post("/generate", json=one)
        timer.join()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(len(prompts))))
    out = ask(pair.http, [body(prompts[0], tokenizer, FULL)])
    assert len(out[0]["output_ids"]) == NUM_TOKENS


def test_marked_text_is_refused(pair: Pair, passages: Passages):
    """The decode server would read the separators."""
    text = marked([passages()]).text
    params = {"max_new_tokens": 4}
    for path, json in {
        "/generate": {"text": text, "sampling_params": params},
        "/v1/completions": {"model": "default", "prompt": text, "max_tokens": 4},
        "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }.items():
        reply = pair.http.post(path, json=json)
        assert reply.status_code == 400, (path, reply.text)
        assert "the decode server reads the request too" in reply.text, (path, reply.text)
