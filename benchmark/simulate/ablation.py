"""Sweeps over parts of a budget and shapes of a prompt, in kind of the papers' own.

    ablate    what each part of CFO saves (Cache-Craft section 6, figure 26): the same requests, the same store and the
              same variants, of which each budget would compute so much
    shapes    what is computed by number and length of chunks (CacheBlend figure 15, Cache-Craft figure 27)

Only costs: the papers' quality needs a model, see docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmark.common.results import markdown_table
from benchmark.simulate.engine import simulate
from benchmark.simulate.plots import add_legend, draw_lines
from benchmark.simulate.report import Report, percent, row_of
from benchmark.simulate.settings import Settings
from benchmark.simulate.trace import Trace, TraceSpec, generate
from matplotlib.figure import Figure

from chunk_cache.index.need import system_charge, unit_cfo_of
from chunk_cache.index.reusability import adjusted_overlap, first_places, order_penalty, prefix_overlap, share_to_fix
from chunk_cache.index.variant import Variant
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt

ALPHAS = (0.5, 1.0, 2.0, 3.0)
Context = tuple[Hashable, ...]
Cost = Callable[[Variant, Context, bytes], float]
"""Of a variant behind a new context and system prompt, at alpha 1."""


def _overlap(variant: Variant, context: Context) -> float:
    """beta of a variant behind a new context."""
    statistics = variant.statistics
    assert statistics is not None, f"{variant} without statistics in a simulation"
    return prefix_overlap(variant.context, statistics.inter, context)


def _impact(variant: Variant) -> float:
    """CCI; what was computed alone costs all there is, as in `unit_cfo`."""
    assert variant.statistics is not None, f"{variant} without statistics in a simulation"
    return float(variant.statistics.cci) if variant.context else 1.0


def _whole(variant: Variant, context: Context, system: bytes) -> float:
    return unit_cfo_of(variant, first_places(context), system)


def _without_system(variant: Variant, context: Context, system: bytes) -> float:
    return unit_cfo_of(variant, first_places(context), variant.system)


def _without_order(variant: Variant, context: Context, system: bytes) -> float:
    return _impact(variant) * (1.0 - _overlap(variant, context)) + _charge(variant, system)


def _without_overlap(variant: Variant, context: Context, system: bytes) -> float:
    return _impact(variant) + _charge(variant, system)


def _without_impact(variant: Variant, context: Context, system: bytes) -> float:
    penalty = order_penalty(variant.context, context)
    return 1.0 - adjusted_overlap(_overlap(variant, context), penalty) + _charge(variant, system)


def _charge(variant: Variant, system: bytes) -> float:
    return 0.0 if variant.system == system else system_charge(variant, system)


BUDGETS: Mapping[str, Cost] = MappingProxyType(
    {
        "CFO": _whole,
        "without S: one system prompt": _without_system,
        "without gamma: any order is as good": _without_order,
        "without beta': CCI alone": _without_overlap,
        "without CCI: 1 - beta' alone": _without_impact,
    }
)
"""Costs by what is left out of CFO = alpha (CCI (1 - beta (1 - gamma)) + S)."""


def recomputed_shares(trace: Trace, settings: Settings, alphas: Sequence[float]) -> dict[str, list[float]]:
    """Share of the tokens brought in that each of `BUDGETS` computes again, by alpha; the store obeys the whole CFO."""
    num_reused = 0
    sums = {name: [0.0] * len(alphas) for name in BUDGETS}

    def observe(prompt: ChunkPrompt, sources: Sequence[tuple[ChunkPlan, Variant]]) -> None:
        nonlocal num_reused
        spans = [start for start, _ in prompt.options.spans]
        for chunk, variant in sources:
            num_reused += chunk.num_reused
            context = prompt.context(spans.index(chunk.start))
            for name, cost in BUDGETS.items():
                unit = cost(variant, context, prompt.system)
                for i, alpha in enumerate(alphas):
                    sums[name][i] += share_to_fix(alpha * unit) * chunk.num_reused

    simulate(trace, settings, observe=observe)
    return {name: [total / max(1, num_reused) for total in totals] for name, totals in sums.items()}


def ablate(traces: Mapping[str, Trace], pool_tokens: int, alphas: Sequence[float] = ALPHAS) -> Report:
    """The sweep over parts of CFO; one table per trace."""
    rows: list[dict[str, object]] = []
    text = [
        "Share of the tokens brought in that a budget computes again. The requests, the store (lru, remember misses)",
        f"and the choice of the variant are the same for all; KV memory of {pool_tokens:,} tokens. CFO is",
        "alpha (CCI (1 - beta (1 - gamma)) + S), S what another system prompt costs. Attention is synthetic.",
    ]
    found = {}
    for name, trace in traces.items():
        settings = Settings(max(pool_tokens, trace.max_prompt_len))
        shares = found[name] = recomputed_shares(trace, settings, alphas)
        header = ["budget", *(f"alpha {alpha:g}" for alpha in alphas)]
        text += [
            "",
            f"*{name}*",
            "",
            *trace.source,
            *[""] * bool(trace.source),
            *markdown_table(header, [[b, *map(percent, s)] for b, s in shares.items()]),
        ]
        rows += [
            {"trace": name, "budget": budget, "alpha": alpha, "recomputed_share": f"{share:.5f}"}
            for budget, by_alpha in shares.items()
            for alpha, share in zip(alphas, by_alpha, strict=True)
        ]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (name, shares) in zip(panels, found.items(), strict=True):
            series = {budget: (list(alphas), [[100 * share] for share in values]) for budget, values in shares.items()}
            draw_lines(axes, series, xlabel="alpha", ylabel="of what is brought in, % computed again")
            axes.set_title(name, fontsize=10)
        add_legend(figure, axes, ncols=3)

    return Report("ablation", "Parts of CFO", rows, text, draw)


NUMBERS, LENGTHS = (2, 5, 10, 20), (128, 256, 512, 1024)


def shapes(
    spec: TraceSpec, numbers: Sequence[int] = NUMBERS, lengths: Sequence[int] = LENGTHS, pool_share: float = 0.4
) -> Report:
    """The sweep over chunks per request and tokens per chunk, of drawn traces.

    Args:
        spec: of the others.
        pool_share: KV memory, in copies of all chunks.
    """
    rows: list[dict[str, object]] = []
    tables: dict[str, list[list[str]]] = {"0.15": [], "CFO": []}
    lines: dict[str, tuple[list[float], list[list[float]]]] = {}
    for number in numbers:
        cells: dict[str, list[str]] = {budget: [] for budget in tables}
        values = []
        for length in lengths:
            trace = generate(replace(spec, chunks_per_request=number, chunk_len=length))
            size = max(trace.max_prompt_len, round(pool_share * trace.distinct_tokens))
            for budget, settings in (("0.15", Settings(size, alpha=None)), ("CFO", Settings(size))):
                outcome = simulate(trace, settings)
                tally = outcome.tally(len(trace.requests) // 10)
                cells[budget].append(percent(tally.computed_share))
                rows.append({"chunks": number, "chunk_len": length, **row_of(outcome, seed=spec.seed)})
            values.append([100 * tally.computed_share])
        lines[f"{number} chunks"] = (list(lengths), values)
        for budget, table in tables.items():
            table.append([str(number), *cells[budget]])
    text = [
        f"{spec.num_requests:,} requests out of {spec.num_chunks:,} chunks, Zipf exponent {spec.zipf:g}, every order",
        f"new; KV memory for {percent(pool_share, 0)} of one copy of each chunk; the first tenth is not counted. Share",
        "of the prompt tokens that a prefill computes, missed or again.",
    ]
    for budget, title in (("0.15", "Ratio 0.15"), ("CFO", "Budget by CFO, alpha 1, synthetic attention")):
        header = ["chunks", *(f"of {length} tokens" for length in lengths)]
        text += ["", f"*{title}*", "", *markdown_table(header, tables[budget])]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_lines(axes, lines, xlabel="tokens of a chunk", ylabel="computed by CFO, % of the prompts", xticks=lengths)
        add_legend(figure, axes)

    return Report("shapes", "Compute by number and length of chunks", rows, text, draw, figure_size=(7.0, 4.4))
