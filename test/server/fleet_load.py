"""Load on a fleet: requests through a gateway while something dies and comes back, and what became of them.

`Load` sends while it is entered and keeps every `Answer`; `generate_body` is a request, `replies_in` finds our replies.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from chunk_cache_tools.routing import KEY_HEADER, REPLICA_HEADER, routing_key
from gateway import Gateway
from server.contract import FULL, Marked, check_reply, marked, statuses
from server.tier_contract import tiers
from server_fixture import Server

NUM_TOKENS = 6
NUM_THREADS = 4
NUM_COMPARED = 150
PATIENCE_S = 180.0
"""For a gateway that comes back; it waits for a replica to start, where that is dead too."""


def generate_body(prompt: Marked) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "custom_params": {"chunk_cache": FULL}}
    return {"text": prompt.text, "sampling_params": params}


def replies_in(value: Any) -> list[Any]:
    """Every `chunk_cache` object in a reply, or in the events of a stream."""
    if isinstance(value, list):
        return [found for one in value for found in replies_in(one)]
    if not isinstance(value, dict):
        return []
    own = [value["chunk_cache"]] if isinstance(value.get("chunk_cache"), dict) else []
    return own + [found for key, one in value.items() if key != "chunk_cache" for found in replies_in(one)]


@dataclass(frozen=True)
class Answer:
    """A reply of the load: when it was there, from which replica, and what became of its chunks."""

    at: float
    url: str
    prompt: Marked
    text: str
    statuses: list[str]
    tiers: list[str | None]


@dataclass
class Load:
    """Requests over sets of chunks, each with a beginning of its own, until it is left.

    Attributes:
        retries: whether a request is sent again that finds no gateway, or one that has found no replica yet.
        lost: when they were sent, of requests that failed.
    """

    gateway: Gateway
    sets: list[list[str]]
    retries: bool = False
    answers: list[Answer] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._threads = [self._pool.submit(self._run, i) for i in range(NUM_THREADS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for one in self._threads:
            one.result(timeout=2 * PATIENCE_S)
        self._pool.shutdown()

    def statuses_of(self, url: str, since: float = 0.0) -> list[str]:
        """Of the chunks of requests that a replica has answered since then."""
        return [status for one in list(self.answers) if one.url == url and one.at > since for status in one.statuses]

    def has_hits(self, server: Server, since: float = 0.0, num: int = 10) -> bool:
        return self.statuses_of(server.url, since).count("hit") >= num

    def has_loaded(self, since: float, num: int = 10) -> bool:
        """Whether so many chunks of requests that were answered since then came from a tier."""
        return sum(tier is not None for one in list(self.answers) if one.at > since for tier in one.tiers) >= num

    def check_answers(self, server: Server, num: int = NUM_COMPARED) -> int:
        """Each is the one without reuse, of a part of all, evenly spread.

        Returns:
            How many were compared, at most `num`.
        """
        compared = self.answers[:: -(-len(self.answers) // num)]
        for one in compared:
            off = {"chunk_cache": {"mode": "off"}, "sampling": {"ignore_eos": False}}
            assert one.text == server.generate(one.prompt.text, max_new_tokens=NUM_TOKENS, **off)["text"], one
        return len(compared)

    def _run(self, thread: int) -> None:
        with httpx.Client(base_url=self.gateway.url, timeout=60, trust_env=False) as http:
            for i in itertools.count():
                if self._is_over.is_set():
                    return
                chunks = self.sets[i % len(self.sets)]
                self._ask(http, marked(chunks[:: 1 if i % 2 else -1], head=f"{thread} {i} "))

    def _ask(self, http: httpx.Client, prompt: Marked) -> None:
        headers = {KEY_HEADER: routing_key(prompt.chunks)}
        sent = time.monotonic()
        while True:
            try:
                response = http.post("/generate", json=generate_body(prompt), headers=headers)
                if not (self.retries and response.headers.get("x-smg-error-code") == "model_not_found"):
                    break
            except httpx.TransportError:
                if not self.retries:
                    raise
            assert time.monotonic() < sent + PATIENCE_S, f"no gateway for {PATIENCE_S:g} s"
            time.sleep(0.05)
        if response.status_code != 200:
            self.lost.append(sent)
            return
        value = response.json()
        (reply,) = replies_in(value)
        check_reply(reply, value["meta_info"]["prompt_tokens"])
        url = response.headers[REPLICA_HEADER]
        self.answers.append(Answer(time.monotonic(), url, prompt, value["text"], statuses(reply), tiers(reply)))
