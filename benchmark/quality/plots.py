"""Plots: `draw_family` draws one family's score and KL over the ratio, a line per method, a band over the models.

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmark.quality.spread import MethodCurve, Point
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vP*"
POINT_MARKERS = "xX>+1"  # black, for methods of a single ratio
LINES = ("-", "--", ":")
MIN_KL = 1e-6  # below it lies what rounding does


def draw_family(
    path: str | Path, title: str, score_name: str, reference: Point | None, curves: Sequence[MethodCurve]
) -> None:
    """Writes a PNG.

    Args:
        reference: score of the full prefill, drawn as a line.
        curves: one per method; those of a single ratio are drawn as a black mark.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    if reference is not None:
        left.axhline(100 * reference.mean, color="black", linestyle="--", linewidth=1, label="full prefill")
        left.axhspan(100 * reference.low, 100 * reference.high, color="black", alpha=0.08, linewidth=0)
    for curve, style in zip(curves, _styles(curves), strict=True):
        _draw(left, curve, [point and _scaled(point, 100) for point in curve.scores], style)
        _draw(right, curve, [point and _floored(point) for point in curve.kls], style)
    left.set_ylabel(f"{score_name}, %")
    left.set_ylim(-3, 103)
    right.set_ylabel("KL of the first token to full prefill, nats")
    right.set_yscale("log")
    for axes in (left, right):
        _set_ratio_axis(axes, sorted({ratio for curve in curves for ratio in curve.ratios}))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _styles(curves: Sequence[MethodCurve]) -> list[dict[str, Any]]:
    """Colour, marker and line of each curve, all different."""
    styles: list[dict[str, Any]] = []
    num_lines = num_points = 0
    for curve in curves:
        if len(curve.ratios) == 1:
            marker = POINT_MARKERS[num_points % len(POINT_MARKERS)]
            styles.append({"color": "black", "marker": marker, "linestyle": "none", "markersize": 8, "zorder": 3})
            num_points += 1
        else:
            turn, index = divmod(num_lines, len(COLOURS))
            line = {"linestyle": LINES[turn % len(LINES)], "linewidth": 1.5, "markersize": 5}
            styles.append({"color": COLOURS[index], "marker": MARKERS[index], **line})
            num_lines += 1
    return styles


def _draw(axes: Axes, curve: MethodCurve, points: Sequence[Point | None], style: dict[str, Any]) -> None:
    drawn = [(ratio, point) for ratio, point in zip(curve.ratios, points, strict=True) if point is not None]
    ratios = [ratio for ratio, _ in drawn]
    axes.plot(ratios, [point.mean for _, point in drawn], label=curve.label, **style)
    lows, highs = [point.low for _, point in drawn], [point.high for _, point in drawn]
    if len(ratios) > 1:
        axes.fill_between(ratios, lows, highs, color=style["color"], alpha=0.1, linewidth=0)
    else:
        axes.vlines(ratios, lows, highs, color=style["color"], linewidth=1)


def _scaled(point: Point, factor: float) -> Point:
    return Point(factor * point.mean, factor * point.low, factor * point.high)


def _floored(point: Point) -> Point:
    return Point(*(max(MIN_KL, value) for value in (point.mean, point.low, point.high)))


def _set_ratio_axis(axes: Axes, ratios: Sequence[float]) -> None:
    """Square roots, so that the small ratios, which matter, have room."""
    axes.set_xscale("function", functions=(lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x * x))
    axes.set_xlim(-0.001, 1.05)
    axes.xaxis.set_major_locator(FixedLocator(list(ratios)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("recompute ratio (square-root scale)")
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
