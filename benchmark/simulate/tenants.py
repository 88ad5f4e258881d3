"""Tenants: a quiet and a noisy one share the KV memory, with and without `partition_share`; what each of them finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmark.common.results import markdown_table
from benchmark.simulate.engine import simulate
from benchmark.simulate.plots import add_legend, draw_lines
from benchmark.simulate.report import Report, percent
from benchmark.simulate.settings import Settings
from benchmark.simulate.tally import Tally
from benchmark.simulate.trace import Request, Trace, TraceSpec, generate
from matplotlib.figure import Figure

QUIET_REQUESTS = 400
NOISY_PER_QUIET = 9
POOL_TOKENS = 100_000
SHARES = (1.0, 0.75, 0.5, 0.25)
POLICIES = ("lru", "frequency-reuse")
WARM_UP = 0.25
"""Share of the requests, from the first on, that are not counted."""

QUIET = TraceSpec("quiet", num_chunks=100, seed=1)
NOISY: Mapping[str, TraceSpec] = {
    "passages that come once": TraceSpec("flood", num_chunks=10, new_share=1.0, seed=2),
    "a large corpus": TraceSpec("large", num_chunks=2_000, zipf=0.8, seed=2),
}


@dataclass(frozen=True, slots=True)
class _Case:
    noisy: str
    policy: str
    share: float
    quiet: Tally
    others: Tally


def mixed(quiet: Trace, noisy: Trace, num_per_quiet: int) -> Trace:
    """Behind each request of the quiet tenant, 0, so many of the noisy one, 1."""
    first = len(quiet.lengths)
    requests = []
    for i, request in enumerate(quiet.requests):
        requests.append(request)
        for other in noisy.requests[i * num_per_quiet : (i + 1) * num_per_quiet]:
            chunks = tuple(first + chunk for chunk in other.chunks)
            requests.append(Request(chunks, other.question_len, other.session, tenant=1))
    name = f"{quiet.name} and {noisy.name}"
    return Trace(name, tuple(requests), quiet.lengths + noisy.lengths, quiet.system_len)


def tenants(share: float = 1.0) -> Report:
    """Kinds of noise x policies x shares; and the quiet tenant alone in the same memory."""
    num_quiet = max(10, round(share * QUIET_REQUESTS))
    quiet = generate(replace(QUIET, num_requests=num_quiet))
    first_quiet = round(WARM_UP * num_quiet)
    alone = {policy: simulate(quiet, Settings(POOL_TOKENS, policy)).tally(first_quiet) for policy in POLICIES}
    cases = []
    for kind, spec in NOISY.items():
        noisy = generate(replace(spec, num_requests=num_quiet * NOISY_PER_QUIET))
        trace = mixed(quiet, noisy, NOISY_PER_QUIET)
        counted = range(first_quiet * (1 + NOISY_PER_QUIET), len(trace.requests))
        of = [[i for i in counted if trace.requests[i].tenant == tenant] for tenant in (0, 1)]
        for policy in POLICIES:
            for most in SHARES:
                outcome = simulate(trace, Settings(POOL_TOKENS, policy, partition_share=most))
                cases.append(_Case(kind, policy, most, outcome.tally_of(of[0]), outcome.tally_of(of[1])))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2, sharey=True)
        for one, kind in zip(axes, NOISY, strict=True):
            series = {}
            for policy in POLICIES:
                own = [case for case in cases if (case.noisy, case.policy) == (kind, policy)]
                for name in ("quiet", "others"):
                    rates = [[100 * getattr(case, name).chunk_hit_rate] for case in own]
                    series[f"{'noisy' if name == 'others' else name}, {policy}"] = (list(SHARES), rates)
            draw_lines(one, series, xlabel=f"share that a tenant may have; noise: {kind}", ylabel="chunks found, %")
            one.set_ylim(0, 103)
        figure.suptitle("A noisy tenant", fontsize=10, x=0.01, ha="left")
        add_legend(figure, axes[0], ncols=2)

    header = ["noise", "policy", "share", "quiet: chunks found", "computed", "noisy: chunks found", "computed"]
    table = []
    for policy, tally in alone.items():
        table.append(["none", policy, "", percent(tally.chunk_hit_rate), percent(tally.computed_share), "", ""])
    rows: list[dict[str, object]] = []
    for case in cases:
        rates = [rate for one in (case.quiet, case.others) for rate in (one.chunk_hit_rate, one.computed_share)]
        most = "off" if case.share == 1.0 else f"{case.share:g}"
        table.append([case.noisy, case.policy, most, *map(percent, rates)])
        names = ("quiet_hit_rate", "quiet_computed", "noisy_hit_rate", "noisy_computed")
        values = {name: f"{rate:.5f}" for name, rate in zip(names, rates, strict=True)}
        rows.append({"noise": case.noisy, "policy": case.policy, "share": f"{case.share:g}", **values})
    text = [
        f"{num_quiet} requests of a quiet tenant, 5 chunks each out of 100 of 500 tokens (Zipf exponent 1), and behind",
        f"each {NOISY_PER_QUIET} of a noisy one: of chunks that come once, or out of 2,000 (exponent 0.8). Memory of",
        f"{POOL_TOKENS:,} tokens; the first {percent(WARM_UP, 0)} of the requests do not count; budget: CFO, alpha 1.",
        "*Share*: `partition_share`. *Found*: not computed in full. *Computed*: of the tenant's prompt tokens.",
        "",
        *markdown_table(header, table),
    ]
    return Report("tenants", "A noisy tenant", rows, text, draw)
