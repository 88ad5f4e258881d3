"""Several tokenizer and detokenizer workers: whichever gets a request, it is tokenized, checked, answered alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.conftest import FLAGS, STRICT
from server.contract import SEP, completed, generated, marked, same_logprobs, statuses
from server_fixture import Server

pytestmark = pytest.mark.server

NUM_TRIES = 12
"""Requests of connections of their own, of which each of two workers gets some."""


@pytest.fixture(scope="module")
def workers(model_dir: Path) -> Iterator[Server]:
    flags = (
        "--chunk-cache",
        "--chunk-cache-ratio",
        "1",
        "--tokenizer-worker-num",
        "2",
        "--detokenizer-worker-num",
        "2",
    )
    with Server(model_dir, *FLAGS, *flags, env=STRICT) as server:
        yield server


def ask(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    """By a connection of its own, so that the system chooses the process anew."""
    return httpx.request(method, server.url + path, json=body, timeout=60, trust_env=False)


def answering(server: Server) -> set[int]:
    """The processes that answer when both are asked at once: an idle one may take all that come one by one."""
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: ask(server, "GET", "/chunk_cache/stats"), range(8)))
    return {reply.json()["host"]["pid"] for reply in replies}


@pytest.mark.all
def test_workers_share_the_chunks(workers, stock, tokenizer, passages):
    a, b, c = passages.several(3)
    workers.generate(marked([a, b, c]).text)
    pids = set()
    for i in range(NUM_TRIES):
        prompt = marked([c, a, b], head=f"{i} ")
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"text": prompt.text, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 5}
        out = ask(workers, "POST", "/generate", body).json()
        assert statuses(generated(out, prompt.spans(tokenizer))) == ["hit"] * 3
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
        message = {"role": "user", "content": prompt.text}
        chat = {"model": "default", "messages": [message], "max_tokens": 4}
        response = ask(workers, "POST", "/v1/chat/completions", chat)
        assert statuses(completed(response.json())) == ["hit"] * 3
        assert response.headers["x-chunk-cache"].startswith("reused=")
        completion = {"model": "default", "prompt": prompt.text, "max_tokens": 4}
        assert statuses(completed(ask(workers, "POST", "/v1/completions", completion).json())) == ["hit"] * 3
        pids |= answering(workers)
    assert len(pids) == 2


@pytest.mark.all
def test_every_worker_refuses_bad_input(workers):
    for _ in range(NUM_TRIES):
        for body in ({"text": f"a {SEP} b"}, {"input_ids": [10**6]}):
            assert ask(workers, "POST", "/generate", body).status_code == 400


@pytest.mark.all
def test_every_worker_administrates(workers, passages):
    (a,) = passages.several(1)
    instances = set()
    assert json.loads(ask(workers, "POST", "/chunk_cache/warm", {"texts": [a]}).text.splitlines()[-1])["stored"]
    for _ in range(NUM_TRIES):
        assert ask(workers, "POST", "/chunk_cache/pin", {"texts": [a], "ttl_s": 60}).json()["pinned"]
        assert ask(workers, "POST", "/chunk_cache/unpin", {"all": True}).json()["unpinned"]
        instances.add(ask(workers, "GET", "/chunk_cache/stats").json()["instance"])
    assert len(instances) == 1
    assert ask(workers, "POST", "/chunk_cache/evict", {"texts": [a]}).json()["evicted"]
    assert ask(workers, "POST", "/chunk_cache/flush", {}).json()["flushed"]
