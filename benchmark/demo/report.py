"""What the demo shows: tables (`warm_table`, `cold_table`, `kinds_table`), `summarize`, `write_json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.demo.answers import DEFAULT, FAMILIES, REUSED, Quality
from benchmark.demo.session import Clocked, Exchange
from rich.box import SIMPLE_HEAD
from rich.table import Table

from chunk_cache_tools.conditions import REFERENCE, Condition

GROUP = 10  # questions in one row of the cold table
LEGEND_WARM = (
    "first token, whole answer: median of what a user waits. same answer: word by word that of full prefill, which is "
    "stock SGLang computing the whole prompt. KL: how far the probabilities of the first word moved; 0 is not at all. "
    "nats lost: how much less likely full prefill's own answer became, per token; 0.1 is 10 %, 0.7 is half."
)
LEGEND_COLD = (
    "Nothing is stored when the first question comes. new: passages seen for the first time, which everybody must "
    "compute; reused: tokens of passages seen before, wherever they stood."
)


def name_of(condition: Condition) -> str:
    """Name of a condition in the tables."""
    if condition == REFERENCE:
        return "stock SGLang, full prefill"
    if condition.ratio == 0:
        return "reuse as stored"
    if condition.ratio == 1:
        return "reuse, everything recomputed"
    assert condition.ratio is not None
    default = " (default)" if condition == DEFAULT else ""
    return f"reuse, {condition.ratio:.0%} recomputed by {condition.label}{default}"


def warm_table(clocked: Sequence[Clocked], qualities: Mapping[Condition, Quality]) -> Table:
    """One row per condition: times, and quality of the answers."""
    table = Table(title="1. Every passage is known: speed and quality", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("first token, ms", "whole answer, ms", "sooner", "same answer", "KL", "nats lost"):
        table.add_column(name, justify="right", style="bold" if name in ("sooner", "nats lost") else "")
    for condition in (REFERENCE, *REUSED):
        first_s, total_s = medians(clocked, condition)
        cells = [f"{1e3 * first_s:.0f}", f"{1e3 * total_s:.0f}", f"{sooner(clocked, condition):.1f}x"]
        if condition == REFERENCE:
            cells += ["", "", ""]
        else:
            quality = qualities[condition]
            cells += [f"{quality.num_same} of {quality.num}", _small(quality.kl), _small(quality.loss)]
        table.add_row(name_of(condition), *cells)
    return table


def medians(clocked: Sequence[Clocked], condition: Condition) -> tuple[float, float]:
    """Median seconds to the first and to the last token."""
    own = [one for one in clocked if one.condition == condition]
    return statistics.median(one.first_s for one in own), statistics.median(one.total_s for one in own)


def sooner(clocked: Sequence[Clocked], condition: Condition) -> float:
    """Stock's time to the first token divided by the condition's: the median over the prompts."""
    stock = [one.first_s for one in clocked if one.condition == REFERENCE]
    own = [one.first_s for one in clocked if one.condition == condition]
    return statistics.median(a / b for a, b in zip(stock, own, strict=True))


def cold_table(exchanges: Sequence[Exchange]) -> Table:
    """One row per ten questions, then one for all."""
    title = f"2. An empty cache: the first {len(exchanges)} questions, default method"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("questions", "passages (new)", "prompt tokens", "reused", "recomputed", "stock ms", "reuse ms"):
        table.add_column(name, justify="right")
    table.add_column("sooner", justify="right", style="bold")
    starts = range(0, len(exchanges), GROUP)
    for start in starts:
        group = exchanges[start : start + GROUP]
        table.add_row(f"{start + 1}-{start + len(group)}", *_cold_cells(group), end_section=start == starts[-1])
    table.add_row("all", *_cold_cells(exchanges))
    return table


def _cold_cells(group: Sequence[Exchange]) -> list[str]:
    prompt_len = sum(one.prompt_len for one in group)
    reused, recomputed = (sum(one.reuse[f"{name}_tokens"] for one in group) for name in ("reused", "recomputed"))
    return [
        f"{sum(one.num_passages for one in group)} ({sum(one.num_missed for one in group)})",
        str(prompt_len),
        f"{reused / prompt_len:.0%}",
        f"{recomputed / prompt_len:.0%}",
        f"{1e3 * statistics.median(one.stock_s for one in group):.0f}",
        f"{1e3 * statistics.median(one.reuse_s for one in group):.0f}",
        f"{statistics.median(one.speedup for one in group):.1f}x",
    ]


def kinds_table(right: Mapping[Condition, Mapping[str, tuple[int, int]]]) -> Table:
    """Right answers of the trained model by condition and kind of question."""
    title = "3. Which questions suffer: right answers of the trained model"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for family, what in FAMILIES.items():
        table.add_column(f"{family}: {what}", justify="right", max_width=24)
    for condition, kinds in right.items():
        table.add_row(name_of(condition), *(f"{num} of {total}" for num, total in kinds.values()))
    return table


def summarize(
    clocked: Sequence[Clocked], qualities: Mapping[Condition, Quality], exchanges: Sequence[Exchange]
) -> list[str]:
    """Sentences with the main figures."""
    quality = qualities[DEFAULT]
    cold = statistics.median(one.speedup for one in exchanges)
    return [
        f"With the defaults the first token comes {sooner(clocked, DEFAULT):.1f}x sooner where every passage is known, "
        f"and {cold:.1f}x over the first {len(exchanges)} questions to an empty cache.",
        f"That is not free: {quality.num - quality.num_same} of {quality.num} answers are no longer those of full "
        f"prefill, and {_small(quality.loss)} nats per token are lost. That depends on the model and the questions,",
        "so ask yours: chunk-cache verify MODEL PROMPTS.jsonl",
    ]


def write_json(
    clocked: Sequence[Clocked],
    qualities: Mapping[Condition, Quality],
    exchanges: Sequence[Exchange],
    path: Path,
    about: Mapping[str, Any],
) -> None:
    """Writes everything that was measured as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    warm = [{"condition": name_of(c.condition), "first_s": c.first_s, "total_s": c.total_s} for c in clocked]
    quality = {name_of(condition): asdict(one) for condition, one in qualities.items()}
    cold = [{**asdict(one), "speedup": round(one.speedup, 3)} for one in exchanges]
    report = {**about, "warm": warm, "quality": quality, "cold": cold}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _small(value: float) -> str:
    return "0" if abs(value) < 5e-4 else f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"
