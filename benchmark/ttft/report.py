"""Markdown of the benchmark's report: `to_markdown`, `missed_targets`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.common.paired import LOSS_HEADER, loss_cells
from benchmark.common.results import Spread, markdown_table, run_markdown


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    """Lines of a document with all parts that were measured."""
    lines = ["# Time to first token", "", *run_markdown(report)]
    lines += [f"- model: {report['model']}, fp32 on a CPU, random weights", f"- prompt: {report['prompt']}"]
    lines.append(f"- server flags: `--chunk-cache {' '.join(report['flags'])}`")
    if "ttft" in report:
        lines += ["", "## Reuse against stock", "", *_ttft(report, "ttft")]
    if "methods" in report:
        lines += ["", "## Methods against stock", "", *_ttft(report, "methods"), "", *_selection(report["selection"])]
    if "statistics" in report:
        lines += ["", "## New chunks", "", *_statistics(report["statistics"])]
    if "plain" in report:
        lines += ["", "## Requests without marks", "", *_plain(report["plain"])]
    if "memory" in report:
        lines += ["", "## KV slots of one request", "", *_memory(report["memory"])]
    return lines


def missed_targets(report: Mapping[str, Any]) -> list[str]:
    """One line per target that was not reached."""
    missed = [
        f"{row['system']}: {row['speedup']:g}x, wanted {row['target']:g}x"
        for row in (*report.get("ttft", ()), *report.get("methods", ()))
        if row["met"] is False
    ]
    missed += [
        f"plain {row['request']}: {row['loss_percent']:+g} %, wanted at most {row['target']:g} %"
        for row in report.get("plain", ())
        if not row["met"]
    ]
    if "statistics" in report and not report["statistics"]["met"]:
        row = report["statistics"]
        missed.append(f"new chunks: {row['loss_percent']:+g} %, wanted at most {row['target']:g} %")
    return missed + [
        f"page size {row['page_size']}: {row['slots_used']} slots, allowed {row['slots_allowed']}"
        for row in report.get("memory", ())
        if not row["met"]
    ]


def _ttft(report: Mapping[str, Any], part: str) -> list[str]:
    header = ("system", "exact", "reused", "recomputed", "computed", "seconds: median (min-max)", "speed-up", "target")
    rows = [
        (
            row["system"],
            row["prefix_tokens"],
            row["reused_tokens"],
            row["recomputed_tokens"],
            row["computed_tokens"],
            Spread(**row["seconds"]).text(3),
            f"{row['speedup']:.1f}x",
            "" if row["target"] is None else f"{row['target']:g}x",
        )
        for row in report[part]
    ]
    return [
        f"Seconds of the whole request of one token, on the client's side; {report['repeats']} requests per system, in",
        'turns, each with a new order of the chunks and a new question. Stock is `"mode": "off"` on the same',
        "server. `recomputed` is a part of `reused`.",
        "",
        *markdown_table(header, rows),
    ]


def _selection(rows: list[Mapping[str, Any]]) -> list[str]:
    header = (
        "system",
        "whole request, s",
        "selection, s",
        "share",
        "recomputed rows by layer",
        "focus settled at layer",
    )
    cells = [
        (
            row["system"],
            f"{row['total_s']:.3f}",
            f"{row['selection_s']:.3f}",
            f"{row['share_percent']:.1f} %",
            " ".join(map(str, row["rows_per_layer"])),
            "" if row["focus"] is None else row["focus"]["settled_at_layer"],
        )
        for row in rows
    ]
    return [
        "Further requests with `explain`: what the server itself counted for choosing and dropping rows, a pass of the",
        "question not included. Methods that choose before the forward have nothing to count there.",
        "",
        *markdown_table(header, cells),
    ]


def _statistics(row: Mapping[str, Any]) -> list[str]:
    header = ("remembered, s", "mode off, s", *LOSS_HEADER)
    return [
        f"Prompts of chunks that are new, {row['with_s']['num']} pairs: remembered, with the statistics that methods",
        'rank by and CFO is made of, against `"mode": "off"` on the same server.',
        "",
        *markdown_table(header, [loss_cells(row)]),
    ]


def _plain(rows: list[Mapping[str, Any]]) -> list[str]:
    header = ("request", "prompt", "output", "with `--chunk-cache`, s", "without, s", *LOSS_HEADER)
    cells = [(row["request"], row["prompt_tokens"], row["output_tokens"], *loss_cells(row)) for row in rows]
    return [
        f"The same new prompt to two servers in turns, {rows[0]['with_s']['num']} pairs; the server that is not asked",
        "is paused. Loss is the median over pairs; the interval is what resampling the pairs makes of it.",
        "",
        *markdown_table(header, cells),
    ]


def _memory(rows: list[Mapping[str, Any]]) -> list[str]:
    header = ("page size", "prompt", "output", "reused", "slots used", "allowed")
    names = ("page_size", "prompt_tokens", "output_tokens", "reused_tokens", "slots_used", "slots_allowed")
    return [
        "`num_used_tokens` of `/v1/loads`: the largest value seen while one fused request ran alone. Allowed: prompt",
        "and output in whole pages, plus one page.",
        "",
        *markdown_table(header, [[row[name] for name in names] for row in rows]),
    ]
