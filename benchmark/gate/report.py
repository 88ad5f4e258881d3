"""The page of a run: `markdown` of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.results import markdown_table, run_markdown


def over_time(served: Sequence[Mapping[str, Any]], interval_s: float) -> list[dict[str, Any]]:
    """Per interval of the traffic: requests, the mean ratio (1 where it was exact), and requests by step."""
    rows = []
    for number in range(int(max(one["at_s"] for one in served) // interval_s) + 1):
        some = [one for one in served if one["at_s"] // interval_s == number]
        if some:
            ratios = [1.0 if one["is_exact"] else one["ratio"] for one in some]
            steps = {step: sum(one["step"] == step for one in some) for step in sorted({one["step"] for one in some})}
            rows.append(
                {
                    "from_s": number * interval_s,
                    "requests": len(some),
                    "questions": some[0]["family"] if len({one["family"] for one in some}) == 1 else "both",
                    "mean_ratio": sum(ratios) / len(ratios),
                    "steps": steps,
                }
            )
    return rows


def markdown(report: Mapping[str, Any]) -> list[str]:
    """Lines of the page; written by the benchmark, not by hand."""
    live, other = report["live"], report["others"]
    lines = [
        "# The gate under load",
        "",
        *run_markdown(report["run"]),
        f"- model {report['model']}, {report['traffic']}",
    ]
    lines += ["", "## What it does", ""]
    rows = [
        (f"{row['from_s']:g} s", row["requests"], row["questions"], f"{row['mean_ratio']:.2f}", _steps(row["steps"]))
        for row in live["over_time"]
    ]
    lines += markdown_table(("from", "requests", "questions", "mean ratio", "requests at step"), rows)
    lines += ["", f"Steps: {', '.join(live['steps'])}. Moves:", "", *(f"- {move}" for move in live["moves"])]
    lines += ["", "| check | holds |", "| --- | --- |"]
    lines += [f"| {check['what']} | {'yes' if check['holds'] else 'NO'} |" for check in report["checks"]]
    lines += ["", f"Requests: {live['requests']}", "", "## Against an offline computation of the same requests", ""]
    rows = [
        (
            name,
            live["num_compared"],
            f"{one['largest_difference']:.1e}",
            one["replies_in_another_bucket"],
            f"{one['means'][0]:.4f}, {one['means'][1]:.4f}",
        )
        for name, one in report["offline"].items()
    ]
    lines += markdown_table(("measure", "replies", "largest difference", "in another bucket", "means"), rows)
    if other is None:
        return lines
    lines += ["", "## What it costs others", ""]
    lines += [
        f"Time to first token of plain requests beside as many with chunks, in {other['num_pairs']} pairs of",
        f"{other['seconds']:g} s with the same arrivals, {other['rate']:g} requests a second; the order changes.",
        f"With `verify_share` {other['share']:g}, {other['verified']} replies were verified, and",
        f"{other['given_up']} times that was given up.",
    ]
    rows = [
        (name, _ms(one["without_s"]), _ms(one["with_s"]), f"{one['loss_percent']:+.1f} %", _interval(one))
        for name, one in (("median", other["p50"]), ("p99", other["p99"]))
    ]
    lines += ["", *markdown_table(("", "without", "with", "difference", "95 % interval"), rows)]
    return lines


def _steps(steps: Mapping[Any, int]) -> str:
    return ", ".join(f"{step}: {num}" for step, num in steps.items())


def _ms(spread: Mapping[str, float]) -> str:
    return f"{1e3 * spread['median']:.1f} ms"


def _interval(one: Mapping[str, Any]) -> str:
    low, high = one["loss_95_percent_interval"]
    return f"{low:+.1f} to {high:+.1f} %"
