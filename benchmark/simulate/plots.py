"""Plots of the simulator: lines over a size or a request number, and bars of variants per chunk.

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vP*"

Series = Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]
"""Label -> x [num_points] and, for each x, the values of all seeds."""


def draw_lines(
    axes: Axes, series: Series, *, xlabel: str, ylabel: str, marked: bool = True, xticks: Sequence[float] | None = None
) -> None:
    """One line per series through the mean of the seeds; a band from their smallest to their largest.

    Args:
        xticks: the sizes that were tried, on a logarithmic axis; None = a linear one.
    """
    for i, (label, (x, values)) in enumerate(series.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)] if marked else None
        means = [float(np.mean(seeds)) for seeds in values]
        axes.plot(x, means, label=label, color=colour, marker=marker, markersize=5, linewidth=1.5)
        lows, highs = [min(seeds) for seeds in values], [max(seeds) for seeds in values]
        axes.fill_between(x, lows, highs, color=colour, alpha=0.12, linewidth=0)
    if xticks is not None:
        axes.set_xscale("log")
        axes.set_xticks(list(xticks), [f"{tick:g}" for tick in xticks])
        axes.minorticks_off()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _tidy(axes)


def draw_bars(axes: Axes, heights: Sequence[int], *, xlabel: str, ylabel: str) -> None:
    """Bars side by side, one per chunk."""
    axes.bar(range(len(heights)), heights, width=1.0, color=COLOURS[0])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _tidy(axes)


def add_legend(figure: Figure, axes: Axes, ncols: int = 5) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
