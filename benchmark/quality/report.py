"""Report: `write_report` turns table rows into CSV and a Markdown page; nothing in them is typed by hand.

python benchmark/quality/report.py FOLDER      # the page again, from FOLDER/quality.csv and quality.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.results import markdown_table, run_markdown, write_result
from benchmark.quality.checks import check_rows
from benchmark.quality.question import DataError
from benchmark.quality.spread import MethodCurve, Point, curves_of
from benchmark.quality.table import DEFAULT, MASTERED, Row, read_table, write_table

from chunk_cache_tools.conditions import REFERENCE

NAME = "quality"
SMALL_LOSS = 0.05  # nats a token of the answer
METRIC_NAMES = {
    "exact_match": "exact match",
    "token_f1": "token F1",
    "rouge_l": "ROUGE-L",
    "substring": "answers contained",
}


def write_report(folder: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> list[Path]:
    """Writes `quality.csv`, `quality.json` and `quality.md`; returns their paths.

    Args:
        about: how the rows were made: what `describe_run` returns, and `settings` (name -> text) of the evaluation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{NAME}.csv"
    write_table(table, rows)
    return [table, *write_result(folder, NAME, about, to_markdown(rows, about))]


def to_markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> list[str]:
    """Lines of the page."""
    lines = ["# Answer quality with reused chunks", "", *run_markdown(about)]
    lines += [f"- {name}: {text}" for name, text in about["settings"].items()]
    lines += [
        "",
        "What these numbers allow to conclude, and what not, stands in docs/quality.md. In short: they show whether an",
        "implementation does what it says. The order of methods differs between equally good small models, so it is no",
        "result, and cost cannot be read from models of this size.",
        "",
        "## Full prefill",
        "",
        *_full_table(rows),
    ]
    if checks := check_rows(rows):
        lines += ["", "## Checks of the implementation", ""]
        lines += [f"- {_verdict(check.holds)}, {check.model}: {check.statement} ({check.numbers})" for check in checks]
    for family in _families(rows):
        lines += ["", f"## {family}", "", *_family_section(rows, family)]
    return lines


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**does not hold**"


def _full_table(rows: Sequence[Row]) -> list[str]:
    """Families x models."""
    models = list(dict.fromkeys(row.model for row in rows))
    cells = []
    for family in _families(rows):
        full = {row.model: row for row in rows if row.family == family and row.method == REFERENCE.label}
        shown = [_full_cell(full.get(model)) for model in models]
        row = next(iter(full.values()))
        cells.append((family, METRIC_NAMES[row.metric], row.num_asked, f"{row.prompt_len:.0f}", *shown))
    return [
        f"Score of stock SGLang's full prefill on all prompts, %. Not mastered: under {MASTERED:.0%}; where answers",
        "are right or wrong, only prompts that the full prefill answers right are scored below.",
        "",
        *markdown_table(("family", "score", "prompts", "tokens per prompt", *models), cells),
    ]


def _full_cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{100 * row.score_all:.1f}" + ("" if row.mastered else " (not mastered)")


def _family_section(rows: Sequence[Row], family: str) -> list[str]:
    mine = [row for row in rows if row.family == family]
    curves, composed = split_curves(mine, family)
    num_models = len({row.model for row in mine})
    spread = f"mean of {num_models} models (smallest-largest)" if num_models > 1 else "one model"
    scored = sorted({row.num_scored for row in mine})
    prompts = f"{scored[0]}" if len(scored) == 1 else f"{scored[0]}-{scored[-1]}"
    lines: list[str] = []
    if any(row.scored != "all" for row in mine):
        lines += ["Scored are only prompts that the full prefill of the same model answers right.", ""]
    lines += [f"{METRIC_NAMES[mine[0].metric].capitalize()}, %, {prompts} prompts scored per model, {spread}:", ""]
    lines += _curve_table(curves, [[_percent(point) for point in curve.scores] for curve in curves])
    ends = "outermost ends over the models" if num_models > 1 else "from resampling the prompts"
    lines += ["", f"Difference to full prefill on the same prompts, percentage points [95 % interval, {ends}]:", ""]
    lines += _curve_table(curves, [[_interval(point) for point in curve.diffs] for curve in curves])
    if any(0 < row.num_right < row.num_scored for row in mine):
        num_right = sum({row.model: row.num_right for row in mine}.values())
        lines += ["", f"Likewise, on the {num_right} prompts that full prefill answers with a full score:", ""]
        lines += _curve_table(curves, [[_interval(point) for point in curve.right_diffs] for curve in curves])
    lines += ["", f"KL of the first token's distribution to that of full prefill, nats, all prompts, {spread}:", ""]
    lines += _curve_table(curves, [[_nats(point) for point in curve.kls] for curve in curves])
    if any(point for curve in curves for point in curve.own_losses):
        lines += ["", *_likelihood_section(curves, mine)]
    if composed:
        lines += ["", "### With early termination and grouping", ""]
        lines += [
            "Score, %; in brackets tokens to recompute, % of the reused ones, before what only the forward decides:",
            "early termination, and grouping where a method chooses during the forward.",
            "",
        ]
        lines += _composed_table(curves, composed)
    return lines


def _likelihood_section(curves: Sequence[MethodCurve], rows: Sequence[Row]) -> list[str]:
    """How much likelihood answers lose by reuse, and from which ratio on the loss is small."""
    lines = ["### Likelihood", ""]
    answers = (
        ("Right answer", [(curve, curve.gold_losses, curve.gold_mores) for curve in curves]),
        ("Full prefill's own answer", [(curve, curve.own_losses, curve.own_mores) for curve in curves]),
    )
    for title, mine in answers:
        if any(any(losses) for _, losses, _ in mine):  # summaries have no right answer but the full prefill's own
            lines += [f"{title}: log-probability lost against full prefill, nats a token [95 % interval, all prompts]:"]
            lines += ["", *_nats_table([(curve, losses) for curve, losses, _ in mine]), ""]
    for title, mine in answers:
        if shown := [(curve, mores) for curve, _, mores in mine if any(mores)]:
            lines += [
                f"{title}: loss minus that of `{DEFAULT.label}` at {DEFAULT.ratio:g}, question by question.",
                "The intervals of both answers hold together (95 %, Bonferroni):",
                "",
                *_nats_table(shown),
                "",
            ]
    if not any(point for curve in curves for point in curve.gold_losses):
        return lines[:-1]
    lines += [
        f"Smallest ratio from which on a method loses less than {SMALL_LOSS} nats a token of the right answer, by the",
        f"mean and by the end of its interval; prompts that would tell a loss of {SMALL_LOSS} from none (95 %), by the",
        "spread of the losses at the method's smallest ratio:",
        "",
    ]
    cells = []
    for curve in curves:
        mean, sure = (_from_ratio(curve, bound) for bound in ("mean", "high"))
        first = [row for row in rows if row.method == curve.label and row.ratio == curve.ratios[0]]
        needed = [row.num_asked * (1.96 * row.gold_loss_se / SMALL_LOSS) ** 2 for row in first if row.gold_loss_se]
        cells.append((f"`{curve.label}`", mean, sure, f"{max(needed):.0f}" if needed else "-"))
    return [*lines, *markdown_table(("method", "mean", "interval", "prompts"), cells)]


def _from_ratio(curve: MethodCurve, bound: str) -> str:
    """The smallest ratio from which on all losses are small by their `bound`."""
    small = [point is not None and getattr(point, bound) < SMALL_LOSS for point in curve.gold_losses]
    first = len(small)
    while first and small[first - 1]:
        first -= 1
    return f"{curve.ratios[first]:g}" if first < len(small) else f"none up to {curve.ratios[-1]:g}"


def _composed_table(curves: Sequence[MethodCurve], composed: Sequence[MethodCurve]) -> list[str]:
    """Each method without and with options, at the ratios that were measured with options."""
    ratios = sorted({ratio for curve in composed for ratio in curve.ratios})
    cells = []
    for name in dict.fromkeys(curve.label.partition(":")[0] for curve in composed):
        for curve in (*curves, *composed):
            if curve.label.partition(":")[0] == name:
                at = dict(zip(curve.ratios, zip(curve.scores, curve.shares, strict=True), strict=True))
                shown = [_with_share(*at[ratio]) if ratio in at else "" for ratio in ratios]
                cells.append((f"`{curve.label}`", *shown))
    return markdown_table(("method", *(f"{ratio:g}" for ratio in ratios)), cells)


def _with_share(score: Point | None, share: Point | None) -> str:
    return "-" if score is None or share is None else f"{100 * score.mean:.1f} ({100 * share.mean:.1f})"


def split_curves(rows: Sequence[Row], family: str) -> tuple[list[MethodCurve], list[MethodCurve]]:
    """Curves of the methods without, and with, early termination or grouping."""
    curves = curves_of(rows, family)
    return [c for c in curves if not c.is_composed], [c for c in curves if c.is_composed]


def _curve_table(curves: Sequence[MethodCurve], texts: Sequence[Sequence[str]]) -> list[str]:
    """Methods x ratios."""
    ratios = sorted({ratio for curve in curves for ratio in curve.ratios})
    cells = []
    for curve, row in zip(curves, texts, strict=True):
        at = dict(zip(curve.ratios, row, strict=True))
        cells.append((f"`{curve.label}`", *(at.get(ratio, "") for ratio in ratios)))
    return markdown_table(("method", *(f"{ratio:g}" for ratio in ratios)), cells)


def _nats_table(curves: Sequence[tuple[MethodCurve, Sequence[Point | None]]]) -> list[str]:
    """A table of differences in nats a token."""
    texts = [[_interval(point, 1.0, 3) for point in points] for _, points in curves]
    return _curve_table([curve for curve, _ in curves], texts)


def _percent(point: Point | None) -> str:
    if point is None:
        return "-"
    spread = f" ({100 * point.low:.0f}-{100 * point.high:.0f})" if point.low != point.high else ""
    return f"{100 * point.mean:.1f}{spread}"


def _interval(point: Point | None, scale: float = 100.0, digits: int = 1) -> str:
    if point is None:
        return "-"
    mean, low, high = (f"{scale * value:+.{digits}f}" for value in (point.mean, point.low, point.high))
    return f"{mean} [{low}, {high}]"


def _nats(point: Point | None) -> str:
    if point is None:
        return "-"
    spread = f" ({point.low:.2g}-{point.high:.2g})" if point.low != point.high else ""
    return f"{point.mean:.2g}{spread}"


def _families(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.family for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds quality.csv and quality.json")
    folder = parser.parse_args(argv).folder
    try:
        rows = read_table(folder / f"{NAME}.csv")
        about = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))
    except (DataError, OSError, json.JSONDecodeError) as error:
        print(f"{folder}: no result of evaluate.py ({error})", file=sys.stderr)
        return 1
    for path in write_report(folder, rows, about):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
