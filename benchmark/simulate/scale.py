"""Scale: a fleet on one store of millions of passages at a thousand requests a second, by policy of its gateway.

    serve(services, num_replicas, policy, settings, hardware) -> Served
    scale_report(trace, ...) -> Report

The trace is multiplied by `services`, the store modelled by `shared_store`, the gateway as in `fleet`. The first half
of the requests is not counted: pools fill up meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.common.results import RESULTS_DIR, markdown_table
from benchmark.simulate.fleet import POLICIES, RATIO, Sent
from benchmark.simulate.plots import draw_lines
from benchmark.simulate.report import Report, Row, percent
from benchmark.simulate.services import Keys, Services, multiply
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.shared_store import Hardware, SharedStore, StoreReplay
from benchmark.simulate.tally import FIELDS, Tally
from benchmark.simulate.trace import Trace
from matplotlib.figure import Figure

NUM_STORED = 10_000_000
RATE = 1_000.0
SECONDS = 40.0
NUM_REPLICAS = 64
POOL_TOKENS = 400_000
POLICIES_SHOWN = ("random", "cache-aware", "session", "passages", "held, prefix")
LEDGER, LOOKUP = RESULTS_DIR / "index" / "ledger.json", RESULTS_DIR / "index" / "lookup.json"


@dataclass(frozen=True)
class Served:
    """What became of the counted requests.

    Attributes:
        tally: of all replicas.
        seconds: that they took to come.
        busiest: rows of the busiest replica, in means of all.
        loaded, slow, written: bytes from the store, bytes that were computed since that is sooner, bytes to the store.
        waits: seconds of each request with loads.
        num_events: of all replicas.
        variants, entries: of each replica at the end, in its pool's index and in its ledger of the store.
    """

    tally: Tally
    seconds: float
    busiest: float
    loaded: int
    slow: int
    written: int
    waits: np.ndarray
    num_events: int
    variants: Sequence[int]
    entries: Sequence[int]

    @property
    def rows(self) -> int:
        return self.tally.computed_tokens + self.tally.recomputed_tokens

    def wait_ms(self, quantile: float) -> float:
        return 1e3 * float(np.quantile(self.waits, quantile)) if len(self.waits) else 0.0


def serve(
    services: Services, num_replicas: int, policy: str, settings: Settings, hardware: Hardware, rate: float = RATE
) -> Served:
    """Replays the requests of all services over replicas that share a store.

    Raises:
        SettingsError: a replica's memory is smaller than the longest prompt.
    """
    trace = services.trace
    if settings.pool_tokens < trace.max_prompt_len:
        problem = f"{settings.pool_tokens} tokens do not hold the longest prompt, which has {trace.max_prompt_len}"
        raise SettingsError(f"pool_tokens: {problem}; give at least as many")
    store, keys = SharedStore(services, hardware), Keys(len(trace.lengths))
    replicas = [StoreReplay(trace, settings, keys=keys, store=store) for _ in range(num_replicas)]
    sent, choose = Sent(trace, num_replicas), POLICIES[policy]()
    rows = np.zeros((num_replicas, len(FIELDS)), dtype=np.int64)
    half = len(trace.requests) // 2
    written = 0
    for i, request in enumerate(trace.requests):
        if i == half:
            rows[:] = 0
            written = store.num_bytes_written
            for replica in replicas:
                replica.reset_flow()
        at = choose(request, sent, replicas)
        sent.note(request, at)
        replicas[at].now = i / rate
        rows[at] += replicas[at].answer(request)
    tallies = [Tally(*map(int, row)) for row in rows]
    computed = [tally.computed_tokens + tally.recomputed_tokens for tally in tallies]
    return Served(
        tally=Tally(*map(int, rows.sum(axis=0))),
        seconds=(len(trace.requests) - half) / rate,
        busiest=max(computed) * num_replicas / max(1, sum(computed)),
        loaded=hardware.token_bytes * sum(replica.num_tokens_loaded for replica in replicas),
        slow=hardware.token_bytes * sum(replica.num_tokens_slow for replica in replicas),
        written=store.num_bytes_written - written,
        waits=np.array([wait for replica in replicas for wait in replica.waits]),
        num_events=sum(replica.events.num for replica in replicas),
        variants=[len(replica.manager.index) for replica in replicas],
        entries=[len(replica.ledger) for replica in replicas],
    )


def scale_report(
    one: Trace,
    *,
    num_stored: int = NUM_STORED,
    seconds: float = SECONDS,
    num_replicas: int = NUM_REPLICAS,
    pool_tokens: int = POOL_TOKENS,
    pulse_rate: float,
    hardware: Hardware | None = None,
) -> Report:
    """The page: what each policy finds, moves and computes, and what a replica keeps in mind.

    Args:
        pulse_rate: requests a second of the trace.

    Raises:
        SettingsError: what an entry takes was not measured, or a pool is too small.
    """
    hardware = hardware or Hardware()
    ledger, index_bytes = _measured(LEDGER), _measured(LOOKUP)["bytes_per_variant"]["metadata"]
    services = multiply(one, num_stored, round(seconds * RATE))
    settings = Settings(pool_tokens, alpha=None, ratio=RATIO)
    found = {policy: serve(services, num_replicas, policy, settings, hardware) for policy in POLICIES_SHOWN}
    entry_bytes = ledger["bytes_per_chunk"]

    def memory(served: Served) -> float:
        return max(v * index_bytes + e * entry_bytes for v, e in zip(served.variants, served.entries, strict=True))

    rows: list[Row] = [
        {
            "policy": policy,
            "replicas": num_replicas,
            "stored": services.num_stored,
            "requests": one.tally.num_requests,
            "rows_share": f"{one.tally.computed_share:.5f}",
            "rows_per_s": round(one.rows / one.seconds),
            "chunk_token_hit_rate": f"{one.tally.chunk_token_hit_rate:.5f}",
            "from_store_share": f"{_from_store(one, hardware):.5f}",
            "loaded_bytes_per_s": round(one.loaded / one.seconds),
            "slow_bytes_per_s": round(one.slow / one.seconds),
            "written_bytes_per_s": round(one.written / one.seconds),
            "wait_ms_median": f"{one.wait_ms(0.5):.2f}",
            "wait_ms_p99": f"{one.wait_ms(0.99):.2f}",
            "events_per_s": round(one.num_events / one.seconds),
            "busiest": f"{one.busiest:.3f}",
            "variants_max": max(one.variants),
            "entries_max": max(one.entries),
            "index_bytes_max": round(memory(one)),
        }
        for policy, one in found.items()
    ]

    def line(title: str, value: Callable[[Served], str]) -> list[str]:
        return [title, *map(value, found.values())]

    table = [
        line("passage tokens found", lambda one: percent(one.tally.chunk_token_hit_rate)),
        line("of these from the store", lambda one: percent(_from_store(one, hardware))),
        line("rows, of the prompt tokens", lambda one: percent(one.tally.computed_share)),
        line("thousand rows a second, each replica", lambda one: f"{one.rows / one.seconds / num_replicas / 1e3:.1f}"),
        line("rows of the busiest replica, in means", lambda one: f"{one.busiest:.2f}"),
        line("GB/s from the store", lambda one: f"{one.loaded / one.seconds / 1e9:.1f}"),
        line("GB/s not loaded, as computing is sooner", lambda one: f"{one.slow / one.seconds / 1e9:.1f}"),
        line("GB/s to the store", lambda one: f"{one.written / one.seconds / 1e9:.1f}"),
        line("ms that a request waits for loads, median", lambda one: f"{one.wait_ms(0.5):.1f}"),
        line("the same, p99", lambda one: f"{one.wait_ms(0.99):.1f}"),
        line("events a second, all replicas", lambda one: f"{one.num_events / one.seconds:,.0f}"),
        line("MB of index and ledger by then, fullest replica", lambda one: f"{memory(one) / 1e6:.1f}"),
    ]
    speed = RATE / pulse_rate / len(services.points)
    size = services.num_stored * one.distinct_tokens / len(one.distinct) * hardware.token_bytes
    lookup = ledger["lookup_ms"]
    text = [
        f"{services.trace.name}, which has {len(one.requests):,} requests and {len(one.distinct):,} passages.",
        "Each has texts and passages of its own and is at another point of its week, drawn at random; they send",
        f"{RATE:,.0f} requests a second together, each {speed:.0f} times as many as the real one. What they asked for",
        f"before, {services.num_stored:,} passages, is stored, each as its first request computed it:",
        f"{size / 1e12:.0f} TB of KV.",
        f"{seconds:g} seconds, of which the second half is counted. {num_replicas} replicas with a pool of",
        f"{pool_tokens:,} tokens each; ratio {RATIO:g}; policies as in [fleet](fleet.md).",
        "",
        "Modelled: " + ", ".join(f"{name} {value:g}" for name, value in asdict(hardware).items()) + "; see the head",
        "of `benchmark/simulate/shared_store.py`. A chunk that is computed sooner than loaded is computed.",
        *(["", *one.source] if one.source else []),
        "",
        *markdown_table(["", *found], table),
        "",
        f"What a replica keeps in mind: {index_bytes} bytes for a variant in its pool, {entry_bytes} for one of the",
        "store that it wrote or was told of. One that came to know the whole store would have",
        f"{services.num_stored * entry_bytes / 1e9:.1f} GB of it, and look ten chunks up in {lookup['median']:.2f} ms",
        f"({lookup['p99']:.2f} p99), [measured](../index/ledger.md) with {ledger['chunks']:,} chunks.",
        "Events are those of pool and store, without what is told again.",
    ]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        places = [float(i) for i in range(len(found))]
        share = {"rows, % of the prompts": (places, [[100 * one.tally.computed_share] for one in found.values()])}
        moved = {"GB/s from the store": (places, [[one.loaded / one.seconds / 1e9] for one in found.values()])}
        for axes, series in ((left, share), (right, moved)):
            draw_lines(axes, series, xlabel="policy", ylabel=next(iter(series)), xticks=places)
            axes.set_xticks(places, list(found), rotation=15)

    return Report("scale", "A fleet on a store of ten million passages", rows, text, draw)


def _from_store(served: Served, hardware: Hardware) -> float:
    """Of the passage tokens that were found, those that came from the store."""
    hit = served.tally.chunk_token_hit_rate * served.tally.chunk_tokens
    return served.loaded / hardware.token_bytes / hit if hit else 0.0


def _measured(path: Path) -> dict[str, Any]:
    """A result that was measured before.

    Raises:
        SettingsError: it is not there.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path.name}: not measured yet; run benchmark/index/bench_{path.stem}.py") from None
    return found
