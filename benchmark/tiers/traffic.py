"""Zipf traffic of the soak: `Zipf` draws chunks, `Traffic` keeps clients busy and counts what comes back.

Most requests have several chunks and the server's own ratio. Every tenth has a single chunk and full reuse; no other
request uses these chunks, so they are always computed directly behind the system prompt, and their KV is exact in
whatever tier it was. Every 25th request is sent again with mode off in its own partition, and the log-probabilities are
compared: in turns several chunks at ratio 1.0, and a single chunk with full reuse.
"""

from __future__ import annotations

import bisect
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmark.common.server import Server
from benchmark.tiers.prompts import Corpus, random_tokens
from benchmark.ttft.workload import Prompt

PLACES = ("pool", "host", "disk", "remote", "prefix", "computed")
SINGLE_EVERY, CHECK_EVERY = 10, 25
SINGLE_SHARE = 20  # one in so many chunks is used only alone
OUTPUT_LEN = 4
TOLERANCE = 1e-4


class Zipf:
    """Draws items; the k-th of them in proportion to 1 / k ** exponent."""

    def __init__(self, items: Sequence[int], exponent: float) -> None:
        self._items = items
        self._cumulative = list(itertools.accumulate((k + 1) ** -exponent for k in range(len(items))))

    def draw(self, draw: random.Random, num: int) -> list[int]:
        """`num` distinct items in random order."""
        found: dict[int, None] = {}
        while len(found) < num:
            at = bisect.bisect_left(self._cumulative, draw.random() * self._cumulative[-1])
            found[self._items[at]] = None
        order = list(found)
        draw.shuffle(order)
        return order


@dataclass(frozen=True)
class Check:
    """A reply compared with mode off: where its chunks came from, the largest difference of log-probabilities."""

    kind: str
    at_s: float
    places: tuple[str, ...]
    difference: float


@dataclass
class Tally:
    """Counts over the replies so far; `buckets`: number of the interval -> place -> chunks."""

    interval_s: float
    buckets: dict[int, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    checks: list[Check] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    num_requests: int = 0
    seconds: float = 0.0


class Traffic:
    """Clients in threads.

    Args:
        num_chunks: chunks of a request.
    """

    def __init__(
        self, server: Server, corpus: Corpus, *, num_chunks: int, exponent: float, interval_s: float, seed: int
    ) -> None:
        self._server = server
        self._corpus = corpus
        self._num_chunks = num_chunks
        numbers = list(range(len(corpus.chunks)))
        self._several = Zipf([number for number in numbers if number % SINGLE_SHARE], exponent)
        self._single = Zipf(numbers[::SINGLE_SHARE], exponent)
        self._seed = seed
        self._count = itertools.count(1)
        self._lock = threading.Lock()
        self._go, self._stop = threading.Event(), threading.Event()
        self._num_running = 0
        self.began = time.monotonic()
        self.tally = Tally(interval_s)

    @contextmanager
    def running(self, num_clients: int) -> Iterator[None]:
        """Runs the clients as long as the body runs."""
        self._go.set()
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._go.set()
            for thread in threads:
                thread.join()

    def rest(self, seconds: float, deadline_s: float = 60.0) -> None:
        """Pauses all clients, `seconds` after their last reply, since the server checks its memory only when idle."""
        self._go.clear()
        deadline = time.monotonic() + deadline_s
        while self._num_running:
            if time.monotonic() > deadline:
                self._note_error(f"a request was not answered within {deadline_s:g} s of the last one sent")
                break
            time.sleep(0.02)
        time.sleep(seconds)
        self._go.set()

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            self._go.wait()
            with self._lock:
                self._num_running += 1
            try:
                self._ask(next(self._count), draw)
            except Exception as error:  # noqa: BLE001 - any error is counted and fails the soak
                self._note_error(f"{type(error).__name__}: {error}"[:500])
                time.sleep(1.0)
            finally:
                with self._lock:
                    self._num_running -= 1

    def _ask(self, count: int, draw: random.Random) -> None:
        is_single = count % SINGLE_EVERY == SINGLE_EVERY // 2
        is_checked = count % CHECK_EVERY == 0
        if is_checked:
            is_single = count % (2 * CHECK_EVERY) == 0
        order = self._single.draw(draw, 1) if is_single else self._several.draw(draw, self._num_chunks)
        question = random_tokens(draw, self._corpus.size.question_len, self._corpus.size.shape.vocab)
        prompt = self._corpus.prompt(order, question)
        options: dict[str, Any] = {"method": "full-reuse"} if is_single else {"ratio": 1.0} if is_checked else {}
        began = time.monotonic()
        timed = self._generate(prompt, **options)
        self._note_reply(timed.chunk_cache["chunks"], order, time.monotonic() - began)
        if is_checked:
            off = self._generate(prompt, extra_key=f"check {count}", mode="off")
            kind = "single chunk, ratio 0" if is_single else "several chunks, ratio 1.0"
            places = tuple(place_of(chunk) for chunk in timed.chunk_cache["chunks"])
            check = Check(kind, time.monotonic() - self.began, places, difference(timed.reply, off.reply))
            with self._lock:
                self.tally.checks.append(check)

    def _generate(self, prompt: Prompt, *, extra_key: str | None = None, **options: Any) -> Any:
        body = {} if extra_key is None else {"extra_key": extra_key}
        return self._server.generate(
            prompt.ids,
            max_new_tokens=OUTPUT_LEN,
            chunk_cache={"spans": prompt.spans, **options},
            return_logprob=True,
            **body,
        )

    def _note_reply(self, chunks: Sequence[Mapping[str, Any]], order: Sequence[int], seconds: float) -> None:
        with self._lock:
            tally = self.tally
            bucket = tally.buckets.setdefault(int((time.monotonic() - self.began) / tally.interval_s), Counter())
            bucket.update(place_of(chunk) for chunk in chunks)
            tally.reasons.update(str(chunk["reason"]) for chunk in chunks if chunk["reason"] is not None)
            tally.seen.update(order)
            tally.num_requests += 1
            tally.seconds += seconds

    def _note_error(self, text: str) -> None:
        with self._lock:
            self.tally.errors.append(text)


def place_of(chunk: Mapping[str, Any]) -> str:
    """The one of `PLACES` that a chunk of a reply came from."""
    if chunk["status"] == "hit":
        return str(chunk["tier"])
    return "prefix" if chunk["status"] == "prefix" else "computed"


def difference(reply: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest difference of log-probabilities, up to the first token that differs: later ones have another context."""
    largest = 0.0
    for one, two in zip(*(out["meta_info"]["output_token_logprobs"] for out in (reply, other)), strict=True):
        largest = max(largest, abs(one[0] - two[0]))
        if one[1] != two[1]:
            break
    return largest
