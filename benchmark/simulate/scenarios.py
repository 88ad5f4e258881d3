"""Scenarios: the named simulations that the documentation cites, `SCENARIOS`; each returns a `Report`.

zipf, drift, sessions, growing   policies x sizes of the KV memory on that trace
bounds     N x M against the variants of one chunk
orders     reuse over 10,000 requests of which no two have the same order
storage    FusionRAG's storage experiment (section 5.3.3) in kind
snapshot   Cache-Craft's store at the end of a trace (section 5.4.1, figure 25) in kind
tenants    a noisy and a quiet tenant, with and without a quota (`tenants.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from benchmark.common.results import markdown_table
from benchmark.simulate.baselines import alternative_path
from benchmark.simulate.compare import POLICY_SETTINGS, compare_bounds, compare_policies
from benchmark.simulate.engine import simulate
from benchmark.simulate.plots import add_legend, draw_bars, draw_lines
from benchmark.simulate.report import Report, percent, row_of, spelled
from benchmark.simulate.settings import Settings
from benchmark.simulate.tally import Outcome
from benchmark.simulate.tenants import tenants
from benchmark.simulate.trace import PRESETS, MixSpec, Trace, TraceSpec, generate, generate_mix, shortened
from matplotlib.figure import Figure

Scenario = Callable[[float], Report]
"""Takes the share of the full number of requests; 1 for results that are kept."""

UNBOUNDED = 10**9
POLICY_REQUESTS = 3_000
POLICY_SHARES = (0.05, 0.15, 0.4)
POLICY_SEEDS = (0, 1, 2)

TITLES: Mapping[str, str] = {
    "zipf": "Policies on a Zipf trace",
    "drift": "Policies when popularity drifts",
    "sessions": "Policies with sessions and repeated questions",
    "growing": "Policies with a growing corpus",
}


def _trace_of(spec: TraceSpec, seed: int) -> Trace:
    return generate(replace(spec, seed=seed))


def _describe(spec: TraceSpec) -> str:
    parts = [
        f"{spec.num_requests:,} requests of {spec.chunks_per_request} chunks out of {spec.num_chunks:,}",
        f"Zipf exponent {spec.zipf:g}, {spec.chunk_len} tokens per chunk on average",
        f"order {spec.order!r}",
    ]
    if spec.topic_share:
        parts.append(f"{percent(spec.topic_share, 0)} of the chunks from the first one's topic of {spec.topic_size}")
    if spec.session_len > 1:
        parts.append(f"sessions of {spec.session_len:g} requests, which bring {percent(spec.session_share, 0)} again")
    if spec.repeat_share:
        parts.append(f"{percent(spec.repeat_share, 0)} of the requests repeat an earlier one")
    if spec.initial_share < 1:
        parts.append(f"the corpus begins with {percent(spec.initial_share, 0)} of its chunks")
    if spec.drift_every:
        parts.append(f"all ranks dealt anew every {spec.drift_every} requests")
    return "Trace: " + "; ".join(parts) + "."


def policies(name: str, share: float = 1.0) -> Report:
    """Policies x memory on one of the `PRESETS`."""
    spec = shortened(PRESETS[name], max(20, round(share * POLICY_REQUESTS)))
    if spec.drift_every:
        spec = replace(spec, drift_every=max(1, spec.num_requests // 8))
    seeds = POLICY_SEEDS if share >= 0.5 else POLICY_SEEDS[:1]
    intro = [
        _describe(spec),
        "",
        f"Seeds {', '.join(map(str, seeds))}; the first tenth of the requests is not counted. Budget: CFO, alpha 1.",
        "*computed*: share of the prompt tokens that a prefill computes, because they were not found or to fix them;",
        "*of it again*: the latter alone; *CFO*: that, as a share of the tokens that were brought in.",
    ]
    return compare_policies(
        name,
        TITLES[name],
        partial(_trace_of, spec),
        Settings(UNBOUNDED),
        seeds=seeds,
        pool_shares=POLICY_SHARES,
        labels=list(POLICY_SETTINGS),
        intro=intro,
    )


def bounds(share: float = 1.0) -> Report:
    """N x M x variants per chunk, every new context remembered."""
    spec = shortened(PRESETS["zipf"], max(20, round(share * 3_000)))
    spec = replace(spec, num_chunks=500)
    intro = [
        _describe(spec),
        "",
        "Every chunk that is computed or fixed in a new context is remembered (`remember contexts`) until the bound is",
        "reached; the KV memory itself is unbounded and no generation is too high. Budget: CFO with alpha 1.",
    ]
    return compare_bounds(
        "bounds",
        "N x M variants of all chunks, and of one",
        partial(_trace_of, spec),
        Settings(UNBOUNDED, remember="contexts", max_generation=UNBOUNDED, promote_uses=0),
        seeds=(0,),
        max_variants=(125, 250, 500, 1_000, 2_000),
        per_chunk=(1, 2, 5, 20, 2_000),
        policies=("lru", "frequency-reuse"),
        intro=intro,
    )


def orders(share: float = 1.0) -> Report:
    """Reuse over the number of the request, when no two prompts are alike."""
    spec = PRESETS["orders"]
    spec = shortened(spec, max(20, round(share * spec.num_requests)))
    trace = generate(spec)
    pool_tokens = max(trace.max_prompt_len, round(0.15 * trace.distinct_tokens))
    cases = {
        "lru": Settings(pool_tokens, "lru"),
        "frequency-reuse": Settings(pool_tokens, "frequency-reuse"),
        "lru, half the corpus fits": Settings(round(0.5 * trace.distinct_tokens), "lru"),
        "lru, no derived variants": Settings(pool_tokens, "lru", max_generation=0),
        "prefix cache": Settings(pool_tokens, "lru", reuse=False),
    }
    outcomes = {label: simulate(trace, settings) for label, settings in cases.items()}
    size = max(1, spec.num_requests // 40)
    rates = {label: [window.chunk_hit_rate for window in outcome.windows(size)] for label, outcome in outcomes.items()}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        ends = [float(size * (i + 1)) for i in range(len(rates["lru"]))]
        series = {label: (ends, [[100 * rate] for rate in values]) for label, values in rates.items()}
        draw_lines(axes, series, xlabel="requests", ylabel="chunks not computed in full, %", marked=False)
        axes.set_ylim(0, 100)
        figure.suptitle("Reuse under ever new orders", fontsize=10, x=0.01, ha="left")
        add_legend(figure, axes, ncols=3)

    tenth = max(1, spec.num_requests // 10)
    table = []
    for label, outcome in outcomes.items():
        first, second, last = (outcome.tally(tenth * i, tenth * (i + 1)) for i in (0, 1, 9))
        numbers = [percent(tally.chunk_hit_rate) for tally in (first, second, last)]
        trend = trend_per_thousand(rates[label][4:], size)
        numbers += [f"{100 * trend:+.2f}", percent(last.computed_share), spelled(outcome.generations)]
        table.append([label, *numbers])
    header = ["store", "first tenth", "second", "last", "trend behind it, points per 1,000"]
    header += ["computed in the last tenth", "generation:variants at the end"]
    text = [
        _describe(spec),
        "",
        "No order comes twice. KV memory: 15 % of one copy of each chunk where nothing else is said. Chunks not",
        f"computed in full, in windows of {size} requests; the trend is the slope of a line through all but four.",
        "",
        *markdown_table(header, table),
    ]
    rows = []
    for label, outcome in outcomes.items():
        for i, window in enumerate(outcome.windows(size)):
            rows.append(
                {
                    "store": label,
                    "first_request": i * size,
                    "last_request": (i + 1) * size,
                    "chunks": window.num_chunks,
                    "prefix": window.num_prefix,
                    "hit": window.num_hit,
                    "miss": window.num_miss,
                    "chunk_hit_rate": f"{window.chunk_hit_rate:.5f}",
                    "computed_share": f"{window.computed_share:.5f}",
                    "mean_fix_share": f"{window.mean_fix_share:.5f}",
                    "stored_mean": round(window.mean_stored),
                }
            )
    return Report("orders", "Reuse under ever new orders", rows, text, draw, figure_size=(10.0, 4.6))


def trend_per_thousand(rates: list[float], size: int) -> float:
    """Slope of a line through rates of windows of `size` requests, per 1,000 requests; of fewer than two, 0."""
    if len(rates) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(rates)) * size / 1_000, rates, 1)[0])


STORAGE_MIXES: Mapping[str, MixSpec] = {
    "base": MixSpec(chunks_per_request=6, num_known=1_000, num_shared=300),
    "small knowledge base": MixSpec(chunks_per_request=6, num_known=300, num_shared=100),
    "large knowledge base": MixSpec(chunks_per_request=6, num_known=3_000, num_shared=1_000),
    "flat popularity": MixSpec(chunks_per_request=6, num_known=1_000, num_shared=300, zipf=0.5),
}


def storage(share: float = 1.0) -> Report:
    """1,000 queries, 60 % known, 30 % shared uploads, 10 % unique; against a prefix cache and FusionRAG's rule."""
    rows: list[dict[str, object]] = []
    for label, spec in STORAGE_MIXES.items():
        num_requests = max(20, round(share * spec.num_requests))
        rows += _storage_rows(label, generate_mix(replace(spec, num_requests=num_requests)))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 3)
        mixes, systems = list(STORAGE_MIXES), ["alternative path", "ours", "ours, half the memory"]
        columns = (
            ("storage_saved", "storage saved, %", 71.0),
            ("redundant_saved", "repeated computations saved, %", 82.3),
            ("hit_rate", "hit rate, %", 77.9),
        )
        for one, (column, ylabel, paper) in zip(axes, columns, strict=True):
            series = {}
            for system in systems:
                of_it = {row["mix"]: row for row in rows if row["system"] == system}
                series[system] = (list(range(len(mixes))), [[100 * float(str(of_it[mix][column]))] for mix in mixes])
            draw_lines(one, series, xlabel="", ylabel=ylabel)
            one.axhline(paper, color="black", linestyle="--", linewidth=1, label="FusionRAG's figure")
            one.set_xticks(range(len(mixes)), [mix.replace(" ", "\n", 1) for mix in mixes], fontsize=8)
            one.set_ylim(0, 103)
        figure.suptitle("FusionRAG's storage experiment in kind", fontsize=10, x=0.01, ha="left")
        add_legend(figure, axes[0])

    header = ["mix", "system", "tokens stored", "storage saved", "computed again", "of these saved", "hit rate"]
    table = [["FusionRAG's paper", "alternative path", "", "71.0 %", "4,036 (prefix cache)", "82.3 %", "77.9 %"]]
    for row in rows:
        columns = ("storage_saved", "redundant_saved", "hit_rate")
        storage, again, hits = (percent(float(str(row[column]))) for column in columns)
        cells = [f"{row['stored_tokens']:,}", storage, f"{row['redundant']:,}", again, hits]
        table.append([str(row["mix"]), str(row["system"]), *cells])
    spec = STORAGE_MIXES["base"]
    text = [
        f"{num_requests:,} queries of {spec.chunks_per_request} chunks. {percent(spec.known_share, 0)} of them are",
        f"from the knowledge base, {percent(spec.shared_share, 0)} from uploads that users share; others come once.",
        "Base: 1,000 known and 300 shared chunks, Zipf exponent 1; small: 300 and 100; large: 3,000 and 1,000; flat:",
        "Zipf exponent 0.5. *Prefix cache*: nothing is computed in advance, memory without bound. The others compute",
        "the part of the knowledge base that is asked for in advance, behind the system prompt. *Alternative path*:",
        "FusionRAG's rule as its section 4.1 words it (`benchmark/simulate/baselines.py`). *Computed again*: a chunk's",
        "computations beyond its first. *Half the memory*: of what ours stores without a bound, frequency-reuse.",
        "",
        *markdown_table(header, table),
    ]
    return Report("storage", "FusionRAG's storage experiment in kind", rows, text, draw, figure_size=(12.0, 4.4))


def _storage_rows(mix: str, trace: Trace) -> list[dict[str, object]]:
    asked = trace.distinct
    known = tuple(chunk for chunk in trace.preloaded if chunk in asked)
    prepared = replace(trace, preloaded=known)
    bare = replace(trace, preloaded=())
    base = simulate(bare, Settings(UNBOUNDED, reuse=False))
    ours = simulate(prepared, Settings(UNBOUNDED, promote_uses=0))
    half = simulate(prepared, Settings(max(trace.max_prompt_len, ours.end_stored // 2), "frequency-reuse"))
    found = alternative_path(prepared)

    # The first computation of a chunk is needed in any case; those of the knowledge base lie before the trace.
    base_again = sum(base.num_computed.values()) - len(asked)
    needed = len(asked) - len(known)
    rows: list[dict[str, object]] = []
    for system, stored, computed, hit_rate in (
        ("prefix cache", base.end_stored, sum(base.num_computed.values()), base.tally().chunk_hit_rate),
        ("alternative path", found.stored_tokens, found.num_computed, found.num_found / found.num_chunks),
        ("ours", ours.end_stored, sum(ours.num_computed.values()), ours.tally().chunk_hit_rate),
        ("ours, half the memory", half.end_stored, sum(half.num_computed.values()), half.tally().chunk_hit_rate),
    ):
        again = base_again if system == "prefix cache" else computed - needed
        rows.append(
            {
                "mix": mix,
                "system": system,
                "chunks_asked": trace.num_chunks,
                "distinct_chunks": len(asked),
                "known_chunks_asked": len(known),
                "stored_tokens": stored,
                "storage_saved": f"{1 - stored / base.end_stored:.5f}",
                "computed_chunks": computed,
                "redundant": again,
                "redundant_saved": f"{1 - again / base_again if base_again else 0.0:.5f}",
                "hit_rate": f"{hit_rate:.5f}",
            }
        )
    return rows


SNAPSHOT = TraceSpec(
    "sys-x in kind",
    num_requests=1_000,
    num_chunks=200,
    chunk_len=1_000,
    zipf=0.5,
    order="drawn",
    session_len=6.0,
    session_share=0.4,
    topic_size=10,
    topic_share=0.5,
    repeat_share=0.15,
)
SNAPSHOT_WARM_UP = 20  # requests; Cache-Craft's own


def snapshot(share: float = 1.0) -> Report:
    """100 x 5 instances, any number of them of one chunk; what lies in the store at the end."""
    spec = shortened(SNAPSHOT, max(2 * SNAPSHOT_WARM_UP, round(share * SNAPSHOT.num_requests)))
    trace = generate(spec)
    store = Settings(
        UNBOUNDED,
        remember="contexts",
        max_variants=500,
        max_variants_per_chunk=500,
        max_generation=UNBOUNDED,
        promote_uses=0,
    )
    outcomes = {policy: simulate(trace, replace(store, policy=policy)) for policy in ("frequency-reuse", "lru")}
    main = outcomes["frequency-reuse"]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        xlabel = "chunks in the store, by number of variants"
        draw_bars(left, sorted(main.variants_by_chunk.values(), reverse=True), xlabel=xlabel, ylabel="variants")
        window = max(1, spec.num_requests // 50)
        windows = main.windows(window)
        ends = [float(window * (i + 1)) for i in range(len(windows))]
        series = {
            "chunks not computed in full": (ends, [[100 * one.chunk_hit_rate] for one in windows]),
            "requests of which all chunks were found": (ends, [[100 * one.num_all_hit / window] for one in windows]),
            "tokens that are computed": (ends, [[100 * one.computed_share] for one in windows]),
        }
        draw_lines(right, series, xlabel="requests", ylabel="%", marked=False)
        right.set_ylim(0, 103)
        figure.suptitle("Cache-Craft's store snapshot in kind (frequency-reuse)", fontsize=10, x=0.01, ha="left")
        add_legend(figure, right)

    header = ["", "Cache-Craft, Sys-X", *outcomes]
    text = [
        _describe(spec),
        "",
        "Store: 100 x 5 instances, any number of one chunk, every new (chunk, context) remembered; alpha 1; the first",
        f"{SNAPSHOT_WARM_UP} requests are not counted, as in the paper.",
        "",
        *markdown_table(header, _snapshot_table(trace, list(outcomes.values()))),
        "",
        f"CCI of the synthetic attention: {', '.join(f'{name} {value:.2f}' for name, value in main.cci.items())}.",
    ]
    rows = [row_of(outcome, seed=spec.seed, first=SNAPSHOT_WARM_UP) for outcome in outcomes.values()]
    return Report("snapshot", "Cache-Craft's store snapshot in kind", rows, text, draw)


def _snapshot_table(trace: Trace, outcomes: list[Outcome]) -> list[list[object]]:
    tallies = [outcome.tally(SNAPSHOT_WARM_UP) for outcome in outcomes]
    uses: dict[int, int] = {}
    for request in trace.requests:
        for chunk in request.chunks:
            uses[chunk] = uses.get(chunk, 0) + 1
    popular = set(sorted(uses, key=lambda chunk: -uses[chunk])[: max(1, round(0.05 * len(trace.lengths)))])
    touched = sum(bool(popular.intersection(request.chunks)) for request in trace.requests) / len(trace.requests)
    sizes = [sorted(outcome.variants_by_chunk.values(), reverse=True) or [0] for outcome in outcomes]
    lines: list[tuple[str, str, list[str]]] = [
        ("requests with one of the most popular 5 % of the chunks", "60 %", [percent(touched, 0)] * len(outcomes)),
        ("chunks in the store", "186", [str(len(one)) for one in sizes]),
        ("most variants of one chunk", "11", [str(one[0]) for one in sizes]),
        ("chunks with one variant", "", [str(one.count(1)) for one in sizes]),
        ("instances", "at most 500", [str(sum(one)) for one in sizes]),
        ("requests of which all chunks were found", "most", [percent(t.num_all_hit / t.num_requests) for t in tallies]),
        ("chunks not computed in full", "", [percent(t.chunk_hit_rate) for t in tallies]),
        ("tokens in an exact prefix", "18 %", [percent(t.prefix_tokens / t.prompt_tokens) for t in tallies]),
        ("tokens computed (missed or fixed)", "39 %", [percent(t.computed_share) for t in tallies]),
        ("CFO of what was brought in", "", [percent(t.mean_fix_share) for t in tallies]),
    ]
    return [[label, paper, *ours] for label, paper, ours in lines]


SCENARIOS: Mapping[str, Scenario] = {
    **{name: partial(policies, name) for name in TITLES},
    "bounds": bounds,
    "orders": orders,
    "storage": storage,
    "snapshot": snapshot,
    "tenants": tenants,
}
