"""The papers' figures beside our numbers: `ours_by_axis`, `papers_markdown`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.results import markdown_table
from benchmark.serving.papers import (
    ATTENTION_BY_RATIO,
    OUR_AXES,
    SPEEDUP_AT_LOAD,
    THROUGHPUT_BY_RATE,
    TTFT_BY_RATE,
    TTFT_BY_RATIO,
    PaperFigure,
)
from benchmark.serving.report import by_system, percent_computed
from benchmark.serving.systems import STOCK

Row = Mapping[str, Any]


def ours_by_axis(report: Row, kernel: Row | None) -> dict[str, list[str]]:
    """Lines of Markdown with our numbers on each of `OUR_AXES`; an axis that was not measured says so.

    Args:
        report: of the serving benchmark.
        kernel: of `bench_sparse_extend.py`.
    """
    part = report["serve"]
    closed = by_system(part["runs"], "closed")
    return {
        TTFT_BY_RATIO: _by_ratio(closed, report.get("trained")),
        TTFT_BY_RATE: _by_rate(part, "ttft_p50_s", "median of the time to first token, s"),
        THROUGHPUT_BY_RATE: _by_rate(part, "goodput_per_s", "requests/s within the bound"),
        SPEEDUP_AT_LOAD: _at_load(closed),
        ATTENTION_BY_RATIO: _attention(kernel),
    }


def papers_markdown(figures: Sequence[PaperFigure], ours: Mapping[str, Sequence[str]]) -> list[str]:
    """One section per axis: our table, then what the papers' texts say."""
    lines = [
        "# The papers' figures beside our numbers",
        "",
        "Ours were measured on the machine named in [serving](serving.md), a CPU with a model of random weights;",
        "theirs on GPUs with trained models of 7 to 70 billion parameters. So factors can be set side by side, seconds",
        "cannot.",
        "Only what the texts of the papers state is listed; their figures were not read off.",
    ]
    for axis in OUR_AXES:
        lines += ["", f"## {axis[0].upper()}{axis[1:]}", "", "Ours:", "", *ours[axis]]
        for figure in figures:
            if figure.our_axis == axis:
                lines += ["", f"### {figure.paper}, {figure.figure}", "", f"- axes: {figure.axes}"]
                lines += [f"- set-up, where it differs: {figure.setup}"]
                lines += [f"- {stated}" for stated in figure.stated]
    return lines


def _by_ratio(closed: Mapping[str, Row], trained: Row | None) -> list[str]:
    header = (
        "system",
        "rows computed",
        "TTFT p50, s",
        "against stock",
        "right answers of the trained model, on its own trace",
    )
    right = {row["system"]: f"{100 * row['right']:.1f} %" for row in trained["rows"]} if trained else {}
    stock = closed[STOCK]["ttft_p50_s"]
    cells = [
        (
            f"`{name}`",
            percent_computed(row),
            f"{row['ttft_p50_s']:.3f}",
            f"{stock / row['ttft_p50_s']:.1f}x",
            right.get(name, ""),
        )
        for name, row in closed.items()
    ]
    return markdown_table(header, cells)


def _by_rate(part: Row, measure: str, what: str) -> list[str]:
    points = part.get("points", {})
    if not points:
        return ["not measured"]
    rates = sorted({round(row["rate"], 3) for rows in points.values() for row in rows})
    found = {
        name: {round(row["rate"], 3): row.get(measure) for row in rows if row.get(measure) is not None}
        for name, rows in points.items()
    }
    cells = [
        (f"{rate:.3f}", *(f"{values[rate]:.3f}" if rate in values else "" for values in found.values()))
        for rate in rates
    ]
    return [f"{what[0].upper()}{what[1:]}.", "", *markdown_table(("rate", *(f"`{name}`" for name in found)), cells)]


def _at_load(closed: Mapping[str, Row]) -> list[str]:
    header = ("system", "throughput against stock", "end-to-end latency, stock against it", "the same, p99")
    stock = closed[STOCK]
    cells = [
        (
            f"`{name}`",
            f"{row['requests_per_s'] / stock['requests_per_s']:.2f}x",
            f"{stock['e2e_p50_s'] / row['e2e_p50_s']:.2f}x",
            f"{stock['e2e_p99_s'] / row['e2e_p99_s']:.2f}x",
        )
        for name, row in closed.items()
    ]
    return markdown_table(header, cells)


def _attention(kernel: Row | None) -> list[str]:
    if kernel is None:
        return ["not measured"]
    header = ("rows", "share of the tokens", "time of a full prefill's attention against it", "taken off")
    cells = [
        (row["rows"], f"{row['share']:g}", f"{row['x full']:.1f}x", f"{100 - 100 / row['x full']:.0f} %")
        for row in kernel["results"]
    ]
    about = (
        f"The operation alone, one layer, {kernel['shape']} ([all numbers](../../benchmark/results/kernel/"
        "sparse_extend.md)):"
    )
    return [about, "", *markdown_table(header, cells)]
