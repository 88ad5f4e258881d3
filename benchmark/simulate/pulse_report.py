"""The page about RAGPulse: what stores, policies and systems find in it; see docs/simulator.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmark.common.ragpulse import RagPulse
from benchmark.common.results import markdown_table
from benchmark.simulate.baselines import ORDERS, single_copies
from benchmark.simulate.engine import simulate
from benchmark.simulate.pulse import trace_of_pulse
from benchmark.simulate.report import Report, Row, label_of, percent, row_of
from benchmark.simulate.settings import REMEMBER, Settings
from benchmark.simulate.tally import Tally
from benchmark.simulate.trace import Trace

SIZES = (20_000, 50_000, 100_000, 200_000, 400_000)
WEEK_HITS: Mapping[int, float] = MappingProxyType(
    {20_000: 0.26, 50_000: 0.40, 100_000: 0.55, 200_000: 0.71, 400_000: 0.85}
)
"""Hit rates of an LRU store over all 7,106 requests of RAGPulse's week, of which the first 4,000 are public here."""
UNBOUNDED = 10**9
AGEINGS = (30.0, 10.0, 3.0, 1.0, 0.0)
LAYOUTS: Mapping[int, str] = MappingProxyType(
    {
        0: "as deployed: the whole system prompt in front",
        1: "the last block of the system prompt behind the passages",
        2: "the last two blocks of the system prompt behind the passages",
    }
)
RATIO = 0.15

_LRU = Settings(UNBOUNDED, alpha=None, ratio=RATIO)
POLICIES = (
    _LRU,
    *(replace(_LRU, policy="frequency-reuse", ageing=ageing) for ageing in AGEINGS),
    replace(_LRU, policy="lfu"),
    replace(_LRU, policy="fifo"),
)


class _Replays:
    """Runs each replay of a trace under some settings once; `rows` are the lines of the CSV."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._tallies: dict[tuple[str, str, Settings], Tally] = {}

    def tally(self, trace: Trace, settings: Settings, system: str = "ours") -> Tally:
        key = trace.name, system, settings
        if key not in self._tallies:
            outcome = simulate(trace, settings)
            self.rows.append({"system": system, **row_of(outcome, seed=settings.seed)})
            self._tallies[key] = outcome.tally()
        return self._tallies[key]


def pulse_report(pulse: RagPulse, sizes: Sequence[int] = SIZES) -> Report:
    """The page with all tables; takes about four minutes for 4,000 requests."""
    replays = _Replays()
    trace = trace_of_pulse(pulse)
    text = [
        f"RAGPulse, {len(trace.requests):,} requests, {trace.num_chunks:,} passages, of these {len(trace.distinct):,}",
        f"different with {trace.distinct_tokens:,} tokens. Passages are marked. No request is left out as a warm-up.",
        "",
        *trace.source,
        "",
        *_stores(replays, trace, sizes),
        *_policies(replays, trace, sizes),
        *_systems(replays, pulse, sizes),
        *_remember(replays, trace, sizes),
    ]

    return Report("ragpulse", "A real RAG service: RAGPulse", replays.rows, text)


def _of_chunks(settings: Settings, size: int) -> Settings:
    return replace(settings, holds="chunks", pool_tokens=size)


def _stock(size: int) -> Settings:
    return Settings(size, reuse=False)


def _header(sizes: Sequence[int], first: str) -> list[str]:
    return [first, *("no bound" if size == UNBOUNDED else f"{size:,}" for size in sizes)]


def _stores(replays: _Replays, trace: Trace, sizes: Sequence[int]) -> list[str]:
    table: list[list[object]] = []
    if set(sizes) <= set(WEEK_HITS):
        table.append(["LRU, the whole week (7,106 requests)", *(percent(WEEK_HITS[size], 0) for size in sizes)])
    table.append(["LRU of single copies", *(percent(single_copies(trace, size)) for size in sizes)])
    for settings in POLICIES:
        for remember in REMEMBER if settings.policy in ("lru", "frequency-reuse") else REMEMBER[:1]:
            tallies = [replays.tally(trace, replace(_of_chunks(settings, size), remember=remember)) for size in sizes]
            hits = (percent(tally.chunk_token_hit_rate) for tally in tallies)
            table.append([f"{label_of(settings)}, remember {remember}", *hits])
    return [
        "## Hits of a store of passages",
        "",
        "A *hit* is a token of a passage that the store holds when a request asks for it. The store holds passages and",
        "nothing else, as a tier does; its size is in tokens. *Single copies* knows no variants, the others are the",
        "server's index.",
        "",
        *markdown_table(_header(sizes, "passage tokens hit"), table),
        "",
    ]


def _policies(replays: _Replays, trace: Trace, sizes: Sequence[int]) -> list[str]:
    hits, computed = [], []
    for settings in POLICIES:
        tallies = [replays.tally(trace, replace(settings, pool_tokens=size)) for size in sizes]
        hits.append([label_of(settings), *(percent(tally.chunk_token_hit_rate) for tally in tallies)])
        computed.append([label_of(settings), *(percent(tally.computed_share) for tally in tallies)])
    return [
        "## A KV pool",
        "",
        "The size is that of the server's KV pool, in which system prompts, histories, questions and the running",
        f"request lie too. Rows at ratio {RATIO:g}; remember {REMEMBER[0]}.",
        "",
        *markdown_table(_header(sizes, "passage tokens hit"), hits),
        "",
        *markdown_table(_header(sizes, "prompt tokens computed"), computed),
        "",
    ]


def _systems(replays: _Replays, pulse: RagPulse, sizes: Sequence[int]) -> list[str]:
    sizes = (*sizes, UNBOUNDED)
    lines = [
        "## Against exact systems",
        "",
        "Share of the prompt tokens that are computed. *set-cache* moves KV and fixes nothing: its answers are those",
        f"of full reuse; *ours* (lru) computes {percent(RATIO, 0)} of what it brings in again; the others are exact.",
    ]
    unmoved: list[list[object]] = []
    for num_behind, layout in LAYOUTS.items():
        trace = trace_of_pulse(pulse, num_behind)
        table: list[list[object]] = []
        for system in ("stock", *ORDERS):
            sizes_of = [size for size in sizes if system != "rebuilt" or size != UNBOUNDED]
            tallies = []
            for size in sizes_of:
                ordered = ORDERS[system](trace, size) if system in ORDERS else trace
                tallies.append(replays.tally(ordered, _stock(size), system))
            shares = [percent(tally.computed_share) for tally in tallies]
            table.append([system, *shares, *[""] * (len(sizes) - len(shares))])
        for label, marks_all in (("ours", False), ("ours, history and web results marked too", True)):
            marked = trace_of_pulse(pulse, num_behind, marks_all)
            tallies = [replays.tally(marked, replace(_LRU, pool_tokens=size)) for size in sizes]
            table.append([label, *(percent(tally.computed_share) for tally in tallies)])
            unmoved.append([f"{layout}; {label}", *(percent(tally.unmoved_share) for tally in tallies)])
        lines += ["", f"*{layout}*", "", *markdown_table(_header(sizes, "prompt tokens computed"), table)]
    lines += [
        "",
        "Passages that stand where they were stored could lie in pages that requests share; every request has its own",
        "copy. So much of what ours brings in stands there:",
        "",
        *markdown_table(_header(sizes, "brought in at its stored place"), unmoved),
    ]
    return [*lines, ""]


def _remember(replays: _Replays, trace: Trace, sizes: Sequence[int]) -> list[str]:
    sizes = (*sizes, UNBOUNDED)
    lines = [
        "## What is remembered",
        "",
        "Budget by CFO with alpha 1, by the synthetic attention. *CFO*: share of the tokens brought in that is",
        "computed again. *Without S*: as if all requests had one system prompt.",
    ]
    base = replace(_LRU, alpha=1.0)
    cases = [
        replace(base, policy=policy, ageing=ageing, remember=remember, counts_system=counts_system)
        for policy, ageing in (("lru", _LRU.ageing), ("frequency-reuse", 30.0), ("frequency-reuse", 10.0))
        for remember in REMEMBER
        for counts_system in (True, False)
    ]
    columns = (
        ("passage tokens hit", "chunk_token_hit_rate"),
        ("CFO", "mean_fix_share"),
        ("prompt tokens computed", "computed_share"),
    )
    for name, rate in columns:
        table = [
            [
                f"{label_of(case)}, {case.remember}" + ("" if case.counts_system else ", without S"),
                *(percent(getattr(replays.tally(trace, replace(case, pool_tokens=size)), rate)) for size in sizes),
            ]
            for case in cases
        ]
        lines += ["", *markdown_table(_header(sizes, name), table)]
    return [*lines, ""]
