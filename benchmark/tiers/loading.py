"""What loading costs, measured on a running server: `prime`, `time_idle`, `time_queued`, `time_others`.

A round begins with only the system prompt in the pool (a flush leaves the disk tier). Its first prompt loads all of its
chunks. Each later prompt mixes chunks that are new in this round, which it loads, with chunks that are already in the
KV pool. So one tier of one speed gives loads of several lengths.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmark.common.server import Server
from benchmark.tiers.prompts import Corpus
from benchmark.ttft.workload import Prompt

Tick = Callable[[str], None]  # called with what was just measured

MODES = ("prefetch", "layerwise", "sync")
OPTIONS = {"method": "epic", "ratio": 0.15}
LOADED = (8, 0, 1, 2, 4)  # chunks that the prompts of a round load, in order; the first prompt loads all
QUEUED = 2  # chunks that a request in the queue loads
FRONT_LEN = 32  # tokens of the request that keeps the only slot
WINDOW_SHARE = 0.4  # share of a load's time in which others are watched; layerwise must not begin its forward in it
OTHER_LEN, OTHER_OUTPUT_LEN, NUM_CLIENTS = 64, 4, 2


class Round:
    """Hands out the prompts of a round; each has another first chunk, so that only the system prompt is a prefix."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._known: list[int] = []
        self._fronts: set[int] = set()

    def prompt(self, num_loaded: int) -> Prompt:
        """A prompt with `num_loaded` chunks that are not in the pool yet, and a new question."""
        num_chunks = self._corpus.size.num_chunks
        new = list(range(len(self._known), len(self._known) + num_loaded))
        assert num_loaded <= num_chunks <= len(self._known) + num_loaded, f"{num_loaded} of {num_chunks} chunks to load"
        assert len(self._known) + num_loaded <= len(self._corpus.chunks), "the corpus has no more chunks"
        self._known += new
        front = next(number for number in reversed(self._known) if number not in self._fronts)
        self._fronts.add(front)
        others = [number for number in self._known[::-1] if number != front]  # the newest ones are not evicted
        return self._corpus.prompt_of([front, *others[: num_chunks - 1]])


@dataclass(frozen=True)
class Bench:
    """A server and the corpus of its prompts."""

    server: Server
    corpus: Corpus
    tick: Tick

    def begin_round(self) -> Round:
        """Empties the pool except for the system prompt."""
        self.server.flush()
        self.server.generate([*self.corpus.system, *self.corpus.tokens(8)])
        return Round(self.corpus)

    def ask(self, prompt: Prompt, num_loaded: int) -> float:
        """Seconds of a request for one token; `num_loaded` chunks must come from disk, the others from the pool."""
        timed = self.server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, **OPTIONS})
        reply = timed.chunk_cache
        places = Counter(chunk.get("tier") for chunk in reply["chunks"])
        reused = sum(end - start for start, end in prompt.spans)
        expected = +Counter(disk=num_loaded, pool=len(prompt.spans) - num_loaded)
        if places != expected or reply["reused_tokens"] != reused or reply["prefix_tokens"] != prompt.spans[0][0]:
            raise RuntimeError(f"expected {reused} tokens reused, chunks from {dict(expected)}; the reply: {reply}")
        return timed.total_s


def prime(server: Server, corpus: Corpus, tick: Tick, tier: str | None = "disk", deadline_s: float = 120.0) -> None:
    """Computes each chunk alone behind the system prompt; returns once all are in the tier (None: the pool)."""
    for number in range(len(corpus.chunks)):
        prompt = corpus.prompt([number], ())
        server.generate([*prompt.ids, *corpus.tokens(4)], chunk_cache={"spans": prompt.spans})
        tick("primed")
    deadline = time.monotonic() + deadline_s
    while tier and tier_stats(server)["tiers"][tier]["entries"] < len(corpus.chunks):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all chunks were written within {deadline_s:g} s; see {server.log_path}")
        time.sleep(0.2)


def tier_stats(server: Server) -> dict[str, Any]:
    """`GET /chunk_cache/stats`, for the only rank."""
    rank = server.get("/chunk_cache/stats").json()["ranks"][0]
    assert isinstance(rank, dict)
    return rank


def learn(bench: Bench) -> None:
    """Runs a round that does not count, so that the server learns the times by which layerwise loading decides."""
    one = bench.begin_round()
    for num_loaded in (bench.corpus.size.num_chunks, *LOADED[1:]):
        taken = bench.ask(one.prompt(num_loaded), num_loaded)
        bench.tick(f"not counted, {num_loaded} loaded: {taken:.2f} s")


def time_idle(bench: Bench, repeats: int, computed: int) -> dict[int | str, list[float]]:
    """Seconds of a request on an idle server, by how many chunks it loads; in `computed` rounds also with mode off."""
    seconds: dict[int | str, list[float]] = {num_loaded: [] for num_loaded in LOADED} | {"compute": []}
    for number in range(repeats):
        one = bench.begin_round()
        for num_loaded in LOADED:
            seconds[num_loaded].append(bench.ask(one.prompt(num_loaded), num_loaded))
        if number < computed:
            prompt = one.prompt(0)
            timed = bench.server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, "mode": "off"})
            seconds["compute"].append(timed.total_s)
        bench.tick("idle: " + ", ".join(f"{way}: {values[-1]:.2f} s" for way, values in seconds.items() if values))
    return seconds


def time_queued(bench: Bench, waits_s: Sequence[float], repeats: int) -> dict[float, dict[str, list[float]]]:
    """Seconds of a request behind one that keeps the only slot, by its wait, with `QUEUED` chunks loaded and none."""
    seconds: dict[float, dict[str, list[float]]] = {wait_s: {"disk": [], "pool": []} for wait_s in waits_s}
    for number in range(repeats):
        one = bench.begin_round()
        bench.ask(one.prompt(bench.corpus.size.num_chunks), bench.corpus.size.num_chunks)
        for wait_s, places in seconds.items():
            for place in ("disk", "pool") if number % 2 else ("pool", "disk"):
                num_loaded = QUEUED if place == "disk" else 0
                prompt = one.prompt(num_loaded)
                with _slot_taken(bench.server, bench.corpus, wait_s):
                    places[place].append(bench.ask(prompt, num_loaded))
            bench.tick(f"queue {wait_s:.1f} s: disk {places['disk'][-1]:.2f} s, pool {places['pool'][-1]:.2f} s")
    return seconds


def time_others(bench: Bench, load_s: float, repeats: int, *, is_held: bool) -> list[tuple[float, float]]:
    """Short plain requests per second from clients in a closed loop: (without a load, while one is pending).

    Args:
        is_held: whether a request that loads waits in the queue, so that it does not block the scheduler.
    """
    window_s, num_chunks = WINDOW_SHARE * load_s, bench.corpus.size.num_chunks
    pairs = []
    for _ in range(repeats):
        slow = threading.Thread(target=bench.ask, args=(bench.begin_round().prompt(num_chunks), num_chunks))
        with _closed_loop(bench.server, bench.corpus) as done:
            time.sleep(0.5)
            windows = [_window(window_s)]
            slow.start()
            time.sleep(0.05)
            windows.append(_window(window_s))
            if is_held and tier_stats(bench.server)["held_requests"] != 1:
                raise RuntimeError(
                    f"after {window_s:.1f} s the load is not pending any more: others wait for a forward"
                )
            slow.join()
            time.sleep(0.2)
            windows.append(_window(window_s))
        before, pending, after = (completed(done, *window) / window_s for window in windows)
        pairs.append(((before + after) / 2, pending))
        bench.tick(f"others: {pairs[-1][0]:.1f} / {pending:.1f} per s")
    return pairs


def completed(requests: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How many (begin, end) requests fall into a span of time; a request partly outside counts by its share inside."""
    return sum(max(0.0, min(to, end) - max(begin, start)) / (to - begin) for begin, to in requests)


def _window(seconds: float) -> tuple[float, float]:
    start = time.perf_counter()
    time.sleep(seconds)
    return start, start + seconds


@contextmanager
def _slot_taken(server: Server, corpus: Corpus, seconds: float) -> Iterator[None]:
    """Keeps the only slot with a plain request, which is aborted `seconds` after the body begins."""
    prompt, rid = corpus.tokens(FRONT_LEN), f"front-{time.monotonic_ns()}"
    body = {
        "input_ids": prompt,
        "rid": rid,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 8192, "ignore_eos": True},
    }
    begun = threading.Event()

    def front() -> None:
        for line in server.client.lines("/generate", {**body, "stream": True}):
            if line.startswith("data: {"):
                begun.set()

    def end() -> None:
        server.post("/abort_request", {"rid": rid})

    thread = threading.Thread(target=front)
    thread.start()
    if not begun.wait(60):
        raise RuntimeError("the request in front has not begun within 60 s")
    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        thread.join()


@contextmanager
def _closed_loop(server: Server, corpus: Corpus) -> Iterator[list[tuple[float, float]]]:
    """Runs clients that send short plain requests, one after the other; yields the growing list of (begin, end)."""
    stop, done = threading.Event(), []
    prompts = [corpus.tokens(OTHER_LEN) for _ in range(2000)]

    def client() -> None:
        while not stop.is_set():
            begin = time.perf_counter()
            server.generate(prompts.pop(), max_new_tokens=OTHER_OUTPUT_LEN)
            done.append((begin, time.perf_counter()))

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        stop.set()
        for thread in threads:
            thread.join()
