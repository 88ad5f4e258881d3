"""Report: a curve and what was chosen from it, as CSV, JSON, page, plot, and lines for the terminal.

- `Calibration` holds all that a report shows; `write_report` writes it, `verdict` says it in sentences.
- `flags` are those that a server serves the choice with.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark.common.results import markdown_table, run_markdown, write_result
from benchmark.quality.calibration.asking import ALPHA
from benchmark.quality.calibration.curve import Choice, Point, suffices
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NAME = "calibration"
FLAT = 0.01  # of the recomputed share
BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito (2008), as in the other plots


@dataclass(frozen=True)
class Calibration:
    """One curve and the choice.

    Attributes:
        method: label, without the calibrated value.
        by: `alpha` or `ratio`.
        keep: wanted share of the full prefill's score.
        score_name: the metric, in words.
        full_score: mean score of the full prefill.
        num_asked, num_kept: replies of this run, and of earlier ones.
    """

    method: str
    by: str
    keep: float
    score_name: str
    full_score: float
    num_prompts: int
    num_asked: int
    num_kept: int
    points: Sequence[Point]
    choice: Choice


def verdict(result: Calibration) -> list[str]:
    """Sentences: the choice, how sure it is, and what is odd about the curve."""
    by, keep, choice = result.by, result.keep, result.choice
    if choice.value is None:
        best = max(result.points, key=lambda point: point.share)
        last = result.points[-1]
        lines = [
            f"No {by} of the grid keeps {_percent(keep)} of the full prefill's score, together with all larger ones."
        ]
        if not suffices(best, keep):
            remedy = "try larger --values, another --method or a smaller --keep"
            lines.append(f"The best is {by} {best.value:g} ({_percent(best.share)}); {remedy}.")
            if by == ALPHA and _is_flat(result.points):
                recomputed = _percent(last.recomputed or 0.0)
                lines.append(
                    f"Even {by} {last.value:g} recomputes only {recomputed} of the reused tokens, for a chunk whose "
                    "old context stands in front of it again has a CFO of 0 at any alpha; try --by ratio."
                )
        else:
            remedy = "try larger --values, or more prompts"
            lines.append(f"The largest does not suffice: {by} {last.value:g} ({_percent(last.share)}); {remedy}.")
    else:
        (point,) = [point for point in result.points if point.value == choice.value]
        lines = [
            f"{by} {choice.value:g} is the smallest of the grid that keeps {_percent(keep)} of the full prefill's "
            f"score, together with all larger ones: {_percent(point.share)}, 95 % interval {_interval(point)}."
        ]
        if point is result.points[0]:
            lines.append("Smaller ones were not tried; give some in --values to find out.")
        lines.append(_surety(by, choice))
    for point in choice.passed_over:
        larger = next(p for p in result.points if p.value > point.value and not suffices(p, keep))
        lines.append(
            f"The curve is not monotone: {_at(by, point)}, but {_at(by, larger)}, so {point.value:g} is passed over."
        )
    if choice.dips and not choice.passed_over:
        a, b = choice.dips[0]
        lines.append(f"The curve is not monotone: {_at(by, a)}, {_at(by, b)}. That does not change the choice.")
    return lines


def flags(result: Calibration, config: str | None) -> str | None:
    """Flags of `launch_server` for the chosen value; None where nothing was chosen."""
    if result.choice.value is None:
        return None
    method = ["--chunk-cache", "--chunk-cache-method", result.method.partition(":")[0]]
    if result.by != ALPHA:
        return shlex.join([*method, "--chunk-cache-ratio", f"{result.choice.value:g}"])
    return shlex.join(
        [*method, "--chunk-cache-config", f"@{config}" if config else json.dumps({ALPHA: result.choice.value})]
    )


def table(result: Calibration) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, the full prefill first."""
    header = (result.by, f"{result.score_name}, %", "of full, %", "95 % interval", "recomputed, %", "KL, nats", "keeps")
    rows: list[tuple[str, ...]] = [("full prefill", f"{100 * result.full_score:.1f}", "100.0", "", "", "", "")]
    for point in result.points:
        share = "-" if point.recomputed is None else f"{100 * point.recomputed:.1f}"
        keeps = ("yes" if suffices(point, result.keep) else "no") + (" *" if point.value == result.choice.value else "")
        cells = (f"{100 * point.score:.1f}", f"{100 * point.share:.1f}", _interval(point, unit=""))
        rows.append((f"{point.value:g}", *cells, share, f"{point.kl:.2g}", keeps))
    return header, rows


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines for a terminal; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    return [line.rstrip() for line in (lines[0], "-" * len(lines[0]), *lines[1:])]


def write_report(folder: Path, result: Calibration, about: Mapping[str, Any], config: str | None = None) -> list[Path]:
    """Writes `calibration.csv`, `.json`, `.md` and `.png`; returns their paths.

    Args:
        about: how the curve came about, as `describe_run` gives it, with `settings` (name -> text).
        config: the file that the value is written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    csv_path, plot = folder / f"{NAME}.csv", folder / f"{NAME}.png"
    _write_csv(csv_path, result)
    draw(plot, result)
    report = {**about, "curve": asdict(result)}
    return [csv_path, *write_result(folder, NAME, report, to_markdown(result, about, config)), plot]


def to_markdown(result: Calibration, about: Mapping[str, Any], config: str | None = None) -> list[str]:
    """Lines of the page."""
    header, rows = table(result)
    served = flags(result, config)
    lines = [f"# Calibration of {result.by}: `{result.method}`", "", *run_markdown(about)]
    lines += [f"- {name}: {text}" for name, text in about["settings"].items()]
    lines += ["", *verdict(result), ""]
    lines += [f"Serve with `{served}`.", ""] if served else []
    lines += [f"![{result.by}]({NAME}.png)", "", *markdown_table(header, rows), ""]
    lines += ["`*` is the choice. How to read this stands in docs/calibrate.md."]
    families = list(result.points[0].families)
    if len(families) > 1:
        cells = [(f"{p.value:g}", *(_share(p.families[family]) for family in families)) for p in result.points]
        lines += ["", "Of full, %, family by family:", "", *markdown_table((result.by, *families), cells)]
    return lines


def draw(path: str | Path, result: Calibration) -> None:
    """Writes a PNG: the kept share over the value, and over the recomputed share, which is what it costs."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    points = [point for point in result.points if point.recomputed is not None]
    _draw(left, result, result.points, [point.value for point in result.points])
    _draw(right, result, points, [100 * (point.recomputed or 0.0) for point in points])
    left.set_xlabel(result.by)
    left.set_ylabel(f"{result.score_name}, % of the full prefill's")
    right.set_xlabel("recomputed tokens, % of the reused ones")
    title = f"{result.method} by {result.by}: {result.num_prompts} prompts; bars: 95 % interval from resampling them"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, result: Calibration, points: Sequence[Point], places: Sequence[float]) -> None:
    shares = [100 * point.share for point in points]
    # A percentile interval may leave out the measured share by a hair; a bar has no negative length.
    bars = [[max(0.0, 100 * (p.share - p.low)) for p in points], [max(0.0, 100 * (p.high - p.share)) for p in points]]
    axes.errorbar(places, shares, yerr=bars, color=BLUE, marker="o", markersize=5, capsize=3, label="share of full")
    axes.axhline(100, color="black", linestyle="--", linewidth=1, label="full prefill")
    axes.axhline(
        100 * result.keep, color=ORANGE, linestyle=":", linewidth=1.5, label=f"wanted: {_percent(result.keep)}"
    )
    for point, place, share in zip(points, places, shares, strict=True):
        if point.value == result.choice.value:
            label = f"chosen: {result.by} {point.value:g}"
            axes.plot([place], [share], "o", markersize=13, fillstyle="none", color=ORANGE, label=label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _write_csv(path: Path, result: Calibration) -> None:
    names = ("value", "score", "share", "low", "high", "recomputed", "kl")
    families = list(result.points[0].families)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "by", *names, *(f"share_{family}" for family in families), "chosen"))
        writer.writerow((result.method, "full", "", f"{result.full_score:.6g}", "1", *[""] * (5 + len(families))))
        for point in result.points:
            numbers = [*(getattr(point, name) for name in names), *(point.families[family] for family in families)]
            cells = ["" if number is None else f"{number:.6g}" for number in numbers]
            writer.writerow((result.method, result.by, *cells, "yes" if point.value == result.choice.value else "no"))


def _is_flat(points: Sequence[Point]) -> bool:
    """Whether the largest value recomputes less than everything, and hardly more than the one below it."""
    shares = [point.recomputed for point in points[-2:] if point.recomputed is not None]
    return len(shares) == 2 and shares[1] < 1 and shares[1] - shares[0] < FLAT


def _surety(by: str, choice: Choice) -> str:
    if choice.sure is None:
        return "No value of the grid keeps it with the lower end of its interval; more prompts make intervals narrower."
    if choice.sure == choice.value:
        return "The lower end of its interval keeps it too."
    return f"If the lower end of the interval is to keep it too, take {by} {choice.sure:g}."


def _at(by: str, point: Point) -> str:
    return f"{by} {point.value:g} keeps {_percent(point.share)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(point: Point, unit: str = " %") -> str:
    return f"{100 * point.low:.1f} to {100 * point.high:.1f}{unit}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
