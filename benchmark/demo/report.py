"""What the demo shows at its end: `build_table`, `summarize`, `draw_plot`, `write_json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.demo.session import Exchange
from rich.box import SIMPLE_HEAD
from rich.table import Table

LEGEND = (
    "Tokens of a prompt = exact + reused + computed. exact: prefix that SGLang reuses anyway (in brackets: stock). "
    "reused: from passages seen before, wherever they stood; recomputed: the part of it that was computed again. "
    "computed: the question, and passages seen for the first time (new), which are always a miss."
)


def build_table(exchanges: Sequence[Exchange]) -> Table:
    """One row per question, then totals and medians."""
    table = Table(
        title="Time to first token, stock SGLang (prefix cache on) against chunk reuse",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("#", "passages (new)", "prompt", "exact (stock)", "reused", "recomputed", "computed"):
        table.add_column(name, justify="right")
    for name in ("stock ms", "reuse ms", "ratio"):
        table.add_column(name, justify="right", style="bold")
    for number, exchange in enumerate(exchanges, 1):
        table.add_row(str(number), *_cells(exchange), end_section=number == len(exchanges))
    table.add_row("sum", *_sums(exchanges))
    table.add_row("median", *[""] * 6, *_medians(exchanges))
    return table


def _cells(exchange: Exchange) -> list[str]:
    reuse = exchange.reuse
    return [
        f"{exchange.num_passages} ({exchange.num_missed})",
        str(exchange.prompt_len),
        f"{reuse['prefix_tokens']} ({exchange.stock['prefix_tokens']})",
        *(str(reuse[name]) for name in ("reused_tokens", "recomputed_tokens", "computed_tokens")),
        f"{1e3 * exchange.stock_s:.0f}",
        f"{1e3 * exchange.reuse_s:.0f}",
        f"{exchange.speedup:.1f}x",
    ]


def _sums(exchanges: Sequence[Exchange]) -> list[str]:
    def total(name: str) -> int:
        return sum(exchange.reuse[name] for exchange in exchanges)

    stock_s, reuse_s = sum(e.stock_s for e in exchanges), sum(e.reuse_s for e in exchanges)
    return [
        f"{sum(e.num_passages for e in exchanges)} ({sum(e.num_missed for e in exchanges)})",
        str(sum(e.prompt_len for e in exchanges)),
        f"{total('prefix_tokens')} ({sum(e.stock['prefix_tokens'] for e in exchanges)})",
        *(str(total(name)) for name in ("reused_tokens", "recomputed_tokens", "computed_tokens")),
        f"{1e3 * stock_s:.0f}",
        f"{1e3 * reuse_s:.0f}",
        f"{stock_s / reuse_s:.1f}x",
    ]


def _medians(exchanges: Sequence[Exchange]) -> list[str]:
    return [
        f"{1e3 * statistics.median(e.stock_s for e in exchanges):.0f}",
        f"{1e3 * statistics.median(e.reuse_s for e in exchanges):.0f}",
        f"{statistics.median(e.speedup for e in exchanges):.1f}x",
    ]


def summarize(exchanges: Sequence[Exchange]) -> list[str]:
    """Sentences with the figures that matter."""
    reused = sum(e.reuse["reused_tokens"] for e in exchanges)
    prompt = sum(e.prompt_len for e in exchanges)
    lines = [f"{reused / prompt:.0%} of all prompt tokens came from passages seen before, in another order."]
    known = [e.speedup for e in exchanges if not e.num_missed]
    if known:
        lines.append(
            f"First token {statistics.median(known):.1f}x sooner: median of the {len(known)} questions whose passages "
            "were all stored;"
        )
    lines.append(
        f"{statistics.median(e.speedup for e in exchanges):.1f}x over all questions, first occurrences included."
    )
    return lines


def draw_plot(exchanges: Sequence[Exchange], path: Path, subtitle: str) -> None:
    """A PNG: above, time to first token of both sides; below, where the tokens of each prompt came from."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    numbers = range(1, len(exchanges) + 1)
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 7.5), sharex=True, constrained_layout=True)
    for side, color, shift in (("stock", "#9a9a9a", -0.2), ("reuse", "#1f77b4", 0.2)):
        label = "stock SGLang, prefix cache on" if side == "stock" else "chunk reuse"
        times = [1e3 * getattr(e, f"{side}_s") for e in exchanges]
        above.bar([n + shift for n in numbers], times, width=0.4, color=color, label=label)
    above.set_ylabel("time to first token, ms")
    above.set_title(subtitle, fontsize=10, loc="left")
    above.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    bottom = [0] * len(exchanges)
    for label, color, values in _token_layers(exchanges):
        below.bar(numbers, values, bottom=bottom, color=color, width=0.8, label=label)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    below.set_ylabel("prompt tokens (reuse side)")
    below.set_xlabel("question")
    below.set_xlim(0.3, len(exchanges) + 0.7)
    below.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _token_layers(exchanges: Sequence[Exchange]) -> list[tuple[str, str, list[int]]]:
    replies = [e.reuse for e in exchanges]
    kept = [reply["reused_tokens"] - reply["recomputed_tokens"] for reply in replies]
    return [
        ("exact prefix", "#2ca02c", [reply["prefix_tokens"] for reply in replies]),
        ("reused", "#1f77b4", kept),
        ("reused, recomputed", "#ff9f40", [reply["recomputed_tokens"] for reply in replies]),
        ("computed", "#d62728", [reply["computed_tokens"] for reply in replies]),
    ]


def write_json(exchanges: Sequence[Exchange], path: Path, about: dict[str, Any]) -> None:
    """Everything that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(e), "speedup": round(e.speedup, 3)} for e in exchanges]
    path.write_text(json.dumps({**about, "questions": rows}, indent=2) + "\n", encoding="utf-8")
