"""Plot of a verification: nats lost per token against rows computed, one line per method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from chunk_cache_tools.verify.recommendation import family_of
from chunk_cache_tools.verify.results import Findings, budget_of, name_of, title_of

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito (2008)


def draw(path: Path, findings: Findings) -> None:
    """Writes a PNG. Error bars reach to the bounds; no bar is drawn to an infinite bound."""
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    families: dict[str, list[Any]] = {}
    for one in findings.judged:
        families.setdefault(family_of(one.measured.condition), []).append(one)
    for number, members in enumerate(families.values()):
        members.sort(key=lambda one: one.measured.rows)
        places = [100 * one.measured.rows for one in members]
        losses = [one.loss for one in members]
        bars = [[_reach(one.loss - one.low) for one in members], [_reach(one.high - one.loss) for one in members]]
        color, label = COLORS[number % len(COLORS)], name_of(members[0].measured.condition)
        axes.errorbar(places, losses, yerr=bars, color=color, marker="o", markersize=5, capsize=3, label=label)
        for one, place in zip(members, places, strict=True):
            budget = budget_of(one.measured.condition).partition(" ")[2]
            axes.annotate(budget, (place, one.loss), textcoords="offset points", xytext=(5, 4), fontsize=7, color=color)
    axes.axhline(findings.target, color="black", linestyle=":", linewidth=1.5, label=f"target: {findings.target:g}")
    axes.axhline(0, color="black", linestyle="--", linewidth=1, label="full prefill")
    chosen = findings.verdict.chosen
    if chosen is not None:
        place = 100 * chosen.measured.rows
        label = f"recommended: {title_of(chosen)}"
        axes.plot([place], [chosen.loss], "o", markersize=14, fillstyle="none", color="black", label=label)
    axes.set_yscale("symlog", linthresh=findings.target)
    axes.set_xlabel("rows computed, % of a full prefill's")
    axes.set_ylabel("nats lost per token of full prefill's own answer")
    axes.set_title(f"{len(findings.judged[0].measured.losses)} prompts: {findings.verdict.outcome}", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _reach(length: float) -> float:
    return length if math.isfinite(length) else 0.0
