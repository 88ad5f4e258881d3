"""Plots of the benchmarks of tiers: `draw_loading`, `draw_soak`.

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLES = {
    "sync": {"color": "#D55E00", "marker": "s"},
    "prefetch": {"color": "#0072B2", "marker": "o"},
    "layerwise": {"color": "#009E73", "marker": "D"},
    "pool": {"color": "black", "marker": "", "linestyle": "--"},
    "compute": {"color": "#7F7F7F", "marker": "", "linestyle": ":"},
}


def draw_loading(path: str | Path, report: Mapping[str, Any]) -> None:
    """Writes a PNG: time to first token over the length of the load and over the wait in the queue; what others do."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.7))
    modes = list(dict.fromkeys(row["mode"] for row in report["idle"]))
    idle = {mode: [row for row in report["idle"] if row["mode"] == mode] for mode in modes}
    for mode in modes:
        rows = sorted((row for row in idle[mode] if row["loaded"] != "compute"), key=lambda row: row["load_s"])
        _draw(left, mode, [row["load_s"] for row in rows], [row["seconds"] for row in rows])
    longest = max(row["load_s"] for row in report["idle"])
    for way, loaded in (("pool", 0), ("compute", "compute")):
        spreads = [row["seconds"] for row in idle[modes[0]] if row["loaded"] == loaded]
        _draw(left, way, [0.0, longest] if spreads else [], 2 * spreads)
    left.set_xlabel("loading the chunks that are not in the pool, s")
    left.set_ylabel("time to first token, s")
    left.set_title("idle server", fontsize=10)

    load_s = report["queued"][0]["load_s"]
    for mode in modes:
        rows = [row for row in report["queued"] if row["mode"] == mode]
        at_once = [row["seconds"] for row in idle[mode] if row["load_s"] == load_s]
        xs = [0.0] * len(at_once) + [row["wait_s"] for row in rows]
        _draw(middle, mode, xs, at_once + [row["disk_s"] for row in rows])
    rows = [row for row in report["queued"] if row["mode"] == modes[0]]
    at_once = [row["seconds"] for row in idle[modes[0]] if row["loaded"] == 0]
    _draw(middle, "pool", [0.0, *(row["wait_s"] for row in rows)], at_once + [row["pool_s"] for row in rows])
    middle.axvline(load_s, color="black", linewidth=0.8, alpha=0.5)
    middle.annotate(" load", (load_s, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    middle.set_xlabel("wait in the queue, s")
    middle.set_ylabel("time to first token, s")
    middle.set_title(f"behind a queue, two chunks to load ({load_s:.2g} s)", fontsize=10)

    for x, row in enumerate(report["others"]):
        change = row["change_percent"]
        low, high = change["median"] - change["min"], change["max"] - change["median"]
        right.bar(x, 100 + change["median"], color=STYLES[row["mode"]]["color"], yerr=[[low], [high]], capsize=4)
    right.axhline(100, color="black", linestyle="--", linewidth=1)
    right.set_xticks(range(len(report["others"])), [row["mode"] for row in report["others"]])
    right.set_ylabel("others' requests, % of those without a load")
    right.set_title("others while a load is pending", fontsize=10)
    for axes in (left, middle, right):
        axes.set_ylim(bottom=0)
        _tidy(axes)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, name: str, xs: Sequence[float], spreads: Sequence[Mapping[str, float]]) -> None:
    """A line through the medians, a band from the smallest to the largest."""
    axes.plot(xs, [spread["median"] for spread in spreads], label=name, linewidth=1.5, markersize=5, **STYLES[name])
    lows, highs = [spread["min"] for spread in spreads], [spread["max"] for spread in spreads]
    axes.fill_between(xs, lows, highs, color=STYLES[name]["color"], alpha=0.12, linewidth=0)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


PLACE_COLOURS = {
    "pool": "#0072B2",
    "prefix": "#56B4E9",
    "host": "#009E73",
    "disk": "#E69F00",
    "remote": "#CC79A7",
    "computed": "#7F7F7F",
}


def draw_soak(path: str | Path, report: Mapping[str, Any]) -> None:
    """Writes a PNG: shares of chunks by place over time, memory, and entries of the tiers."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    hits = report["hits"]
    minutes = [(one["at_s"] + report["interval_s"] / 2) / 60 for one in hits]
    places = [place for place in PLACE_COLOURS if any(one.get(place) for one in hits)]
    totals = [sum(one.get(place, 0) for place in places) for one in hits]
    parts = [[100 * one.get(place, 0) / total for one, total in zip(hits, totals, strict=True)] for place in places]
    left.stackplot(minutes, parts, labels=places, colors=[PLACE_COLOURS[place] for place in places], alpha=0.9)
    left.set_ylabel("chunks of replies, %")
    left.set_ylim(0, 100)
    left.legend(loc="lower right", fontsize=8)

    samples = report["samples"]
    times = [one["at_s"] / 60 for one in samples]
    start, budgets = samples[0]["rss"], report["budgets"]
    middle.plot(times, [one["rss"] / 1e6 for one in samples], color=PLACE_COLOURS["pool"], label="scheduler process")
    allowed = (start + budgets["pool"] + budgets["host"]) / 1e6
    middle.axhline(allowed, color="black", linestyle="--", linewidth=1, label="start + pool + host tier")
    middle.set_ylabel("resident memory, MB")
    middle.set_ylim(bottom=0)
    middle.legend(loc="lower right", fontsize=8)

    for name in ("host", "disk"):
        right.plot(times, [one[f"{name}_entries"] for one in samples], color=PLACE_COLOURS[name], label=f"{name} tier")
        most = budgets[name] / report["chunk_bytes"]
        right.axhline(most, color=PLACE_COLOURS[name], linestyle="--", linewidth=1)
    right.set_yscale("log")
    right.set_ylabel("chunks in a tier (dashed: its budget)")
    right.legend(loc="lower right", fontsize=8)
    for axes in (left, middle, right):
        axes.set_xlabel("minutes")
        _tidy(axes)
    figure.savefig(path, dpi=120)
