"""Results: what was measured and what to do about it, as lines for a terminal, a page and a CSV.

- `Findings` holds all of it; `sentences` words the verdict, `flags_of` and `config_of` say how to serve it.
- `write_results` writes `verify.md`, `verify.csv`, the plot and the flags.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chunk_cache.methods import METHODS
from chunk_cache.methods.method_options import ALPHA, BUDGETS, GROUP_SIZE, GROUP_THRESHOLD
from chunk_cache_tools.conditions import Condition
from chunk_cache_tools.verify.fit import Check
from chunk_cache_tools.verify.recommendation import CONFIDENCE, MAX_ROWS, Judged, Outcome, Verdict

NAME = "verify"
FLAGS_FILE, CONFIG_FILE = "flags.txt", "chunk_cache.json"  # of the recommended condition
HEADER = (
    "method",
    "budget",
    "rows, %",
    "fewer rows",
    "KL mean",
    "KL p95",
    "same first, %",
    "nats lost",
    "surely between",
    "holds",
)
GOLD = "of right answers"


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    Attributes:
        about: name -> text: model, prompts, how chunks were stored, target, answers.
        target: largest loss, nats per token.
    """

    about: dict[str, str]
    checks: Sequence[Check]
    target: float
    judged: Sequence[Judged]
    verdict: Verdict


def budget_of(condition: Condition) -> str:
    """`ratio 0.3`, `alpha 1.5` or `ends 20`."""
    assert condition.method is not None
    budget = condition.method.budget
    return f"ratio {condition.ratio:g}" if budget is None else f"{budget} {dict(condition.method.options)[budget]}"


def name_of(condition: Condition) -> str:
    """The method with its options, but without its budget."""
    assert condition.method is not None
    budget = condition.method.budget
    others = [(name, value) for name, value in condition.method.options if name != budget]
    return type(condition.method)(condition.method.method, tuple(others)).label


def title_of(one: Judged) -> str:
    return f"{name_of(one.measured.condition)} at {budget_of(one.measured.condition)}"


def rows_of_table(findings: Findings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of conditions."""
    has_gold = any(len(one.measured.gold_losses) for one in findings.judged)
    rows = []
    for one in findings.judged:
        m = one.measured
        gold = (_nats(float(m.gold_losses.mean())),) if len(m.gold_losses) else ("",)
        rows.append(
            (
                name_of(m.condition),
                budget_of(m.condition),
                f"{100 * m.rows:.0f}",
                f"{1 / m.rows:.1f}x",
                f"{float(m.kls.mean()):.2g}",
                f"{float(np.quantile(m.kls, 0.95)):.2g}",
                f"{100 * m.same_first:.0f}",
                _nats(one.loss),
                f"{_nats(one.low)} to {_nats(one.high)}",
                *(gold if has_gold else ()),
                "yes *" if one is findings.verdict.chosen else "yes" if one.holds else "no",
            )
        )
    header = (*HEADER[:-1], *((GOLD,) if has_gold else ()), HEADER[-1])
    return header, rows


def sentences(findings: Findings) -> list[str]:
    """The verdict in words."""
    verdict, target = findings.verdict, findings.target
    num = len(findings.judged[0].measured.losses)
    lines = []
    if verdict.outcome is Outcome.REUSE:
        assert verdict.chosen is not None
        one = verdict.chosen
        lines.append(
            f"Reuse: {title_of(one)}. It computes {100 * one.measured.rows:.0f} % of the rows of a full prefill "
            f"({1 / one.measured.rows:.1f}x fewer) and costs {_nats(one.loss)} nats per token of full prefill's own "
            f"answers, surely at most {_nats(one.high)}, which is within the target of {target:g}."
        )
        lines.append(
            f"{num} prompts were asked. A kind of prompt that is none of them was not judged: of {num} alike, "
            f"{300 / num:.0f} % may still be of a kind that was never seen."
        )
    elif verdict.outcome is Outcome.MORE_PROMPTS:
        assert verdict.closest is not None
        one = verdict.closest
        if one.holds:
            lines.append(
                f"Passes so far: {title_of(one)} costs {_nats(one.loss)} nats per token, surely at most "
                f"{_nats(one.high)}, which is within the target of {target:g}. It is not recommended yet: that takes "
                f"{num + (verdict.num_more or 0)} prompts, and {num} were asked."
            )
        else:
            lines.append(
                f"Not decided: {num} prompts are too few. {title_of(one)} costs {_nats(one.loss)} nats per token, but "
                f"that may be as much as {_nats(one.high)}, above the target of {target:g}. About {verdict.num_more} "
                "more prompts like these would decide."
            )
    else:
        assert verdict.closest is not None
        one = verdict.closest
        if one.measured.rows > MAX_ROWS:
            reason = (
                f"even {title_of(one)} computes {100 * one.measured.rows:.0f} % of the rows and saves next to nothing"
            )
        else:
            reason = (
                f"nothing that was tried costs less than {target:g} nats per token of full prefill's own answers. The "
                f"closest, {title_of(one)}, costs {_nats(one.loss)} ({_nats(one.low)} to {_nats(one.high)})"
            )
        lines.append(f"Do not reuse here: {reason}.")
        lines.append(
            "Serve these prompts without marks, or with mode exact; a larger --target, larger --ratios or other "
            "--methods can be tried with the same replies."
        )
    lucky = [one for one in findings.judged if one.holds_only_alone]
    if lucky:
        lines.append(
            f"Passed over: {', '.join(map(title_of, lucky))} would hold alone, but the same method fails where it "
            "computes more, so that is taken for luck."
        )
    return lines


def config_of(condition: Condition) -> dict[str, Any]:
    """The object of `--chunk-cache-config` that serves a condition."""
    assert condition.method is not None
    options = dict(condition.method.options)
    alpha = options.pop(ALPHA.name, None)
    if GROUP_THRESHOLD.name in options:  # alone it counts for the windows that this method has by default
        default = METHODS[condition.method.method].option((), GROUP_SIZE.name)
        options = {GROUP_SIZE.name: default, **options}
    return {**({} if alpha is None else {ALPHA.name: alpha}), **({"options": options} if options else {})}


def flags_of(condition: Condition, folder: Path) -> str:
    """The flags of `launch_server` that serve a condition, for a shell; what has no flag is in a file of `folder`."""
    assert condition.method is not None
    flags = ["--chunk-cache", "--chunk-cache-method", condition.method.method]
    if condition.ratio is not None:
        flags += ["--chunk-cache-ratio", f"{condition.ratio:g}"]
    if config_of(condition):
        flags += ["--chunk-cache-config", f"@{folder.resolve() / CONFIG_FILE}"]
    return shlex.join(flags)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines for a terminal; the first two columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(placed).rstrip()

    return [line(header), "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, rows)]


def check_lines(checks: Sequence[Check]) -> list[str]:
    words = {True: "ok  ", False: "FAIL", None: "?   "}
    return [f"{words[check.holds]}  {check.statement}: {check.numbers}" for check in checks]


def write_results(folder: Path, findings: Findings) -> list[Path]:
    """Writes page, CSV and, if a condition is recommended, their flags and configuration; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    header, rows = rows_of_table(findings)
    page, table = folder / f"{NAME}.md", folder / f"{NAME}.csv"
    lines = [f"# Reuse of chunks: {findings.verdict.outcome}", "", *sentences(findings), ""]
    flags, config = folder / FLAGS_FILE, folder / CONFIG_FILE
    for old in (flags, config):  # from an earlier run
        old.unlink(missing_ok=True)
    written = [page, table]
    if findings.verdict.chosen is not None:
        condition = findings.verdict.chosen.measured.condition
        served, configured = flags_of(condition, folder), config_of(condition)
        lines += ["```", f"Serve with: {served}", "```", ""]
        flags.write_text(served + "\n", encoding="utf-8")
        written.append(flags)
        if configured:
            config.write_text(json.dumps(configured) + "\n", encoding="utf-8")
            written.append(config)
    lines += [f"- {name}: {text}" for name, text in findings.about.items()]
    lines += [f"- {check.statement}: {check.numbers}" for check in findings.checks]
    lines += ["", f"![nats lost over rows computed]({NAME}.png)", ""]
    lines += [f"| {' | '.join(header)} |", f"| --- | --- |{' ---: |' * (len(header) - 2)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        "`*`: recommended. *Nats lost* per token of full prefill's own answer; *surely between*: the upper bounds "
        f"all hold together with {CONFIDENCE:.0%}.",
        "How to read this stands in docs/verify.md.",
    ]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_csv(table, findings)
    return written


def as_json(findings: Findings, folder: Path) -> dict[str, Any]:
    """Everything that was found, as plain JSON values; `folder` as of `flags_of`."""
    chosen = findings.verdict.chosen
    condition = None if chosen is None else chosen.measured.condition
    return {
        "outcome": findings.verdict.outcome,
        "flags": None if condition is None else flags_of(condition, folder),
        "more_prompts": findings.verdict.num_more,
        "target": findings.target,
        "about": findings.about,
        "checks": [asdict(check) for check in findings.checks],
        "conditions": [
            {
                name: value if not isinstance(value, float) or math.isfinite(value) else None
                for name, value in row.items()
            }
            for row in map(_numbers_of, findings.judged)
        ],
        "sentences": sentences(findings),
    }


def _numbers_of(one: Judged) -> dict[str, Any]:
    m = one.measured
    assert m.condition.method is not None
    options = dict(m.condition.method.options)
    return {
        "method": name_of(m.condition),
        "ratio": m.condition.ratio,
        **{option.name: options.get(option.name) for option in BUDGETS},
        "num_prompts": len(m.losses),
        "rows": m.rows,
        "kl_mean": float(m.kls.mean()),
        "kl_p95": float(np.quantile(m.kls, 0.95)),
        "same_first": m.same_first,
        "own_loss": one.loss,
        "own_loss_low": one.low,
        "own_loss_high": one.high,
        "gold_loss": float(m.gold_losses.mean()) if len(m.gold_losses) else None,
        "holds": one.holds,
    }


def _write_csv(path: Path, findings: Findings) -> None:
    rows = [{**_numbers_of(one), "chosen": one is findings.verdict.chosen} for one in findings.judged]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def _nats(value: float) -> str:
    if math.isinf(value):
        return "?"
    if abs(value) < 5e-5:
        return "0"
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}"
