"""Measurements: `time_reuse` (stock against reuse), `time_selection` (the part that choosing rows takes),
`time_statistics` (what remembering new chunks costs), `time_plain` (cost for requests without marks), `count_slots`.

Systems take turns within each round, in an order that changes from round to round, so that a drift of the machine
affects all alike.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.common.paired import loss_of_pairs
from benchmark.common.results import Spread
from benchmark.common.server import Server, Timed
from benchmark.ttft.workload import FULL, Prompt, Size, Workload

Tick = Callable[[str], None]  # called with what was just measured


@dataclass(frozen=True)
class System:
    """One way to answer the same prompts: a name, its request options, and the wanted speed-up over stock."""

    name: str
    options: dict[str, Any]
    target: float | None = None


STOCK = System("stock (prefix cache on)", {"mode": "off"})
SYSTEMS = (
    STOCK,
    System("full-reuse", {"method": "full-reuse"}, 20.0),
    System("epic, ratio 0.05", {"method": "epic", "ratio": 0.05}, 10.0),
    System("epic, ratio 0.15", {"method": "epic", "ratio": 0.15}, 4.5),
    System("near, ratio 0.15", {"method": "near", "ratio": 0.15}, 4.5),
    System("near-words, ratio 0.15", {"method": "near-words", "ratio": 0.15}, 4.5),
    System("near-words, ratio 0.15, drift 0.5", {"method": "near-words", "ratio": 0.15, "options": {"drift": 0.5}}),
    System("question-drift, ratio 0.15", {"method": "question-drift", "ratio": 0.15}),
    System("epic, ratio 1.0", {"method": "epic", "ratio": 1.0}),
)
METHODS_RATIO = 0.15
FOCUS = {"focus_window": 3}
METHODS = (
    STOCK,
    *(
        System(f"{method}, ratio {METHODS_RATIO}", {"method": method, "ratio": METHODS_RATIO}, target)
        for method, target in (
            ("epic", 4.5),
            ("cache-craft", 4.5),
            ("cacheblend", 3.6),
            ("a3", 3.6),
            ("fusionrag", 3.6),
            ("question-drift", None),
        )
    ),
    *(
        System(f"{method}, early termination", {"method": method, "ratio": METHODS_RATIO, "options": FOCUS})
        for method in ("cache-craft", "cacheblend")
    ),
)
NUM_EXPLAINED = 2  # prompts per method that are asked with "explain", for the share of time spent on selection


def time_reuse(
    server: Server, work: Workload, systems: Sequence[System], repeats: int, tick: Tick
) -> list[dict[str, Any]]:
    """Primes the chunks, then measures whole requests for one token; one row per system."""
    prime(server, work, tick)
    order, draw = list(systems), random.Random(1)
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    replies: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        draw.shuffle(order)
        for system in order:
            prompt = work.fresh()
            timed = server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, **system.options})
            _check_counts(system, timed.chunk_cache, work)
            seconds[system.name].append(timed.total_s)
            replies[system.name] = timed.chunk_cache
            tick(f"{system.name}: {timed.total_s:.2f} s")
    stock = statistics.median(seconds[STOCK.name])
    return [_row(system, seconds[system.name], replies[system.name], stock, work.size) for system in systems]


def prime(server: Server, work: Workload, tick: Tick) -> None:
    """Computes every chunk once behind the system prompt."""
    for prompt in work.priming():
        server.generate(prompt.ids, chunk_cache={"spans": prompt.spans})
        tick("primed")


def time_selection(server: Server, work: Workload, systems: Sequence[System], tick: Tick) -> list[dict[str, Any]]:
    """Seconds that the server itself counted for choosing rows, and of the whole request; chunks must be primed."""
    rows = []
    for system in systems:
        for _ in range(NUM_EXPLAINED):
            prompt = work.fresh()
            timed = server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, "explain": True, **system.options})
            selection = timed.chunk_cache.get("selection")
            tick(f"{system.name}: selection")
            if selection is not None:
                rows.append(
                    {
                        "system": system.name,
                        "selection_s": selection["seconds"],
                        "total_s": timed.total_s,
                        "share_percent": round(100 * selection["seconds"] / timed.total_s, 1),
                        "rows_per_layer": selection["rows_per_layer"],
                        "focus": selection["focus"],
                    }
                )
    return rows


def _check_counts(system: System, reply: dict[str, Any], work: Workload) -> None:
    """Raises RuntimeError unless the reply reused as many tokens as this measurement means to."""
    size = work.size
    reused = 0 if system is STOCK else size.num_reused_chunks * size.chunk_len
    expected = {"prefix_tokens": size.prefix_len, "reused_tokens": reused}
    found = {name: reply[name] for name in expected}
    if found != expected:
        raise RuntimeError(f"{system.name}: the server says {found}, expected {expected}; its reply: {reply}")


def _row(system: System, seconds: list[float], reply: dict[str, Any], stock: float, size: Size) -> dict[str, Any]:
    names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    speedup = stock / statistics.median(seconds)
    target = system.target if size == FULL else None  # in small prompts the fixed cost of a request dominates
    return {
        "system": system.name,
        "options": system.options,
        **{name: reply[name] for name in names},
        "seconds": Spread.of(seconds).as_dict(),
        "samples_s": [round(value, 4) for value in seconds],
        "speedup": round(speedup, 2),
        "target": target,
        "met": None if target is None else speedup >= target,
    }


@dataclass(frozen=True)
class PlainRequest:
    """A request without marks: lengths in tokens."""

    name: str
    prompt_len: int
    output_len: int


PLAIN_REQUESTS = (PlainRequest("prefill", 1024, 1), PlainRequest("decode", 64, 32))


def time_plain(with_cache: Server, without: Server, work: Workload, repeats: int, tick: Tick) -> list[dict[str, Any]]:
    """Sends the same new prompt to each server while the other is paused; one row per kind of request."""
    rows = []
    for kind in PLAIN_REQUESTS:
        pairs = []
        for number in range(repeats + 1):
            ids = work.tokens(kind.prompt_len)
            order = (with_cache, without) if number % 2 else (without, with_cache)
            seconds = {server: _time_alone(server, order, ids, kind.output_len).total_s for server in order}
            if number:  # in the first pair code is cold
                pairs.append((seconds[with_cache], seconds[without]))
            tick(f"plain {kind.name}: {seconds[with_cache]:.3f} s / {seconds[without]:.3f} s")
        rows.append(_plain_row(kind, pairs))
    for server in (with_cache, without):
        server.resume()
    return rows


def _time_alone(server: Server, servers: tuple[Server, ...], ids: list[int], output_len: int) -> Timed:
    for other in servers:
        if other is not server:
            other.pause()
    server.resume()
    server.generate(ids[:8], max_new_tokens=1, extra_key="wake")  # wakes processes that were paused
    return server.generate(ids, max_new_tokens=output_len)


def time_statistics(server: Server, work: Workload, repeats: int, tick: Tick) -> dict[str, Any]:
    """The loss of prompts of new chunks that are remembered with statistics, against mode off, in turns."""
    modes = ("auto", "off")
    pairs = []
    for number in range(repeats + 1):
        seconds = {}
        for mode in modes if number % 2 else modes[::-1]:
            prompt = work.unseen()
            seconds[mode] = server.generate(
                prompt.ids, chunk_cache={"spans": prompt.spans, "mode": mode, "method": "cache-craft"}
            ).total_s
        if number:
            pairs.append((seconds["auto"], seconds["off"]))
        tick(f"statistics: {seconds['auto']:.2f} s / {seconds['off']:.2f} s")
    return loss_of_pairs(pairs, target=3.0)


def _plain_row(kind: PlainRequest, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    about = {"request": kind.name, "prompt_tokens": kind.prompt_len, "output_tokens": kind.output_len}
    return about | loss_of_pairs(pairs, target=2.0)


def count_slots(server: Server, work: Workload, page_size: int, tick: Tick, output_len: int = 48) -> dict[str, Any]:
    """KV slots in use, as the server itself counts them, while one fused request runs alone on primed chunks."""
    server.flush()
    for prompt in work.priming():
        server.generate(prompt.ids, chunk_cache={"spans": prompt.spans})
    idle = _used_tokens(server)
    prompt = work.fresh()
    used, reply = _watch(server, prompt, output_len)
    pages = -(-(len(prompt.ids) + output_len) // page_size) + 1
    tick(f"page size {page_size}: {used} slots")
    return {
        "page_size": page_size,
        "prompt_tokens": len(prompt.ids),
        "output_tokens": output_len,
        "reused_tokens": reply["reused_tokens"],
        "slots_used": used - idle,
        "slots_used_idle": idle,
        "slots_allowed": pages * page_size,
        "met": reply["reused_tokens"] > 0 and 0 < used - idle <= pages * page_size,
    }


def _watch(server: Server, prompt: Prompt, output_len: int) -> tuple[int, dict[str, Any]]:
    """The largest number of slots in use seen while the request runs, and the reply of the chunk cache."""
    replies: list[dict[str, Any]] = []

    def ask() -> None:
        timed = server.generate(prompt.ids, max_new_tokens=output_len, chunk_cache={"spans": prompt.spans})
        replies.append(timed.chunk_cache)

    thread = threading.Thread(target=ask)
    thread.start()
    used = 0
    while thread.is_alive():
        used = max(used, _used_tokens(server))
        thread.join(0.02)
    if not replies:
        raise RuntimeError("the fused request failed; see the trace above")
    return used, replies[0]


def _used_tokens(server: Server) -> int:
    return int(server.get("/v1/loads").json()["loads"][0]["num_used_tokens"])
