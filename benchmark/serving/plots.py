"""The plot of a serving benchmark: `draw`.

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark.serving.report import by_system
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#7F7F7F")
MARKERS = "soD^vPX*<>hpd"


def draw(path: str | Path, report: Mapping[str, Any]) -> bool:
    """Writes a PNG with a panel per measured part; False, and no file, where nothing can be drawn."""
    panels: list[Callable[[Axes], None]] = []
    serve = report.get("serve", {})
    if "points" in serve:
        panels.append(lambda axes: _rates(axes, serve))
        panels.append(lambda axes: _closed(axes, serve))
    if "pulse" in report:
        panels.append(lambda axes: _pulse(axes, report["pulse"]["layouts"]))
    if "trained" in report:
        panels.append(lambda axes: _quality(axes, report["trained"]["rows"]))
    if "orders" in report:
        panels.append(lambda axes: _orders(axes, report["orders"]["rows"]))
    if not panels:
        return False
    figure = Figure(figsize=(5.2 * len(panels), 4.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
    figure.savefig(path, dpi=110)
    return True


def _rates(axes: Axes, serve: Mapping[str, Any]) -> None:
    for style, (name, points) in zip(_styles(), serve["points"].items(), strict=False):
        rows = sorted((row for row in points if row["ttft_p99_s"] is not None), key=lambda row: row["rate"])
        rates = [row["rate"] for row in rows]
        axes.plot(rates, [row["ttft_p99_s"] for row in rows], label=f"{name}, p99", **style)
        axes.plot(rates, [row["ttft_p50_s"] for row in rows], label=f"{name}, p50", **style | {"linestyle": ":"})
    axes.axhline(serve["bound_s"], color="grey", linewidth=0.8)
    axes.annotate("bound", (0.01, serve["bound_s"]), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel("requests per second, Poisson")
    axes.set_ylabel("time to first token, s")
    axes.legend(fontsize=7)


def _closed(axes: Axes, serve: Mapping[str, Any]) -> None:
    rows = by_system(serve["runs"], "closed").values()
    places = range(len(rows))
    axes.barh(places, [row["requests_per_s"] for row in rows], color=COLOURS[2])
    axes.set_yticks(places, [row["system"] for row in rows], fontsize=8)
    for place, row in zip(places, rows, strict=True):
        axes.annotate(f" {row['requests_per_s']:.2f}", (row["requests_per_s"], place), va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(f"requests per second, {serve['load']['clients']} clients in a closed loop")


def _pulse(axes: Axes, layouts: list[Mapping[str, Any]]) -> None:
    height = 0.8 / len(layouts)
    for i, layout in enumerate(layouts):
        rows = list(by_system(layout["rows"], "closed").values())
        shares = [100 * row["mean_rows"] / row["mean_prompt_len"] for row in rows]
        places = [place + i * height for place in range(len(rows))]
        axes.barh(places, shares, height, color=COLOURS[1 + i], label=f"{layout['behind']} blocks behind the passages")
        axes.set_yticks(range(len(rows)), [row["system"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("rows computed, % of the prompts, RAGPulse")
    axes.legend(fontsize=7)


def _quality(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for style, row in zip(_styles(), rows, strict=False):
        share = 100 * row["mean_rows"] / row["mean_prompt_len"]
        axes.plot(share, 100 * row["right"], label=row["system"], **style | {"linestyle": ""})
    axes.set_xlabel("rows computed, % of the prompt")
    axes.set_ylabel("right answers of the trained model, %")
    axes.set_ylim(top=102)
    axes.legend(fontsize=6, ncols=2)


def _orders(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for style, name in zip(_styles(), dict.fromkeys(row["system"] for row in rows), strict=False):
        own = [row for row in rows if row["system"] == name]
        done = [(row["block"] + 1) * row["num_requests"] for row in own]
        axes.plot(done, [row["requests_per_s"] for row in own], label=name, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("queries so far, each in a new order")
    axes.set_ylabel("requests per second")
    axes.legend(fontsize=8)


def _styles() -> list[dict[str, Any]]:
    return [
        {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.2}
        for i in range(40)
    ]
