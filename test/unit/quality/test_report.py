"""Report: the page says what the table says, and is the same when it is made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.common.results import describe_run
from benchmark.quality.conditions import COMPOSED_RATIOS, FOCUS_OPTIONS, GROUP_OPTIONS
from benchmark.quality.evaluate import parse_args, wanted_conditions
from benchmark.quality.report import main, to_markdown, write_report
from benchmark.quality.spread import Point, curves_of
from benchmark.quality.table import Row

from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER
from chunk_cache_tools.conditions import Condition, MethodSpec

TEMPLATE = Row(
    model="m",
    family="carry",
    method="off",
    ratio=None,
    metric="exact_match",
    num_asked=300,
    num_scored=300,
    scored="all",
    mastered=True,
    score=0.97,
    score_se=0.01,
    score_all=0.97,
    diff=None,
    diff_low=None,
    diff_high=None,
    kl=None,
    kl_se=None,
    first_same=1.0,
    text_same=1.0,
    recomputed=None,
    prompt_len=250.0,
    reused_len=200.0,
    exact_match=0.97,
    token_f1=0.97,
    rouge_l=0.97,
    substring=0.97,
)


def cell(model: str, condition: Condition, score: float, **changes: object) -> Row:
    return replace(
        TEMPLATE,
        model=model,
        method=condition.label,
        ratio=condition.ratio,
        score=score,
        diff=score - 0.97,
        diff_low=score - 1.0,
        diff_high=score - 0.94,
        kl=1 - score,
        **changes,
    )


@pytest.fixture
def rows() -> list[Row]:
    found = []
    for i, model in enumerate(("one", "two", "three")):
        found.append(replace(TEMPLATE, model=model, score=0.96 + 0.01 * i))
        for ratio in (0.0, 0.1, 1.0):
            for name in ("random", "epic"):
                found.append(cell(model, Condition(MethodSpec(name), ratio), 0.2 + 0.7 * ratio + 0.01 * i))
        found.append(cell(model, Condition(MethodSpec("full-reuse"), 0.0), 0.2 + 0.01 * i))
    return found


@pytest.fixture
def about() -> dict:
    return {**describe_run(), "settings": {"tasks": "synthetic"}}


def test_spread_over_models(rows: list[Row]) -> None:
    curves = {curve.label: curve for curve in curves_of(rows, "carry")}
    assert list(curves) == ["full-reuse", "random", "epic"]
    assert curves["random"].ratios == [0.0, 0.1, 1.0]
    assert curves["full-reuse"].ratios == [0.0]
    point, diff = curves["epic"].scores[1], curves["epic"].diffs[1]
    assert (point.mean, point.low, point.high) == pytest.approx((0.28, 0.27, 0.29))
    assert (diff.mean, diff.low, diff.high) == pytest.approx((0.28 - 0.97, 0.27 - 1.0, 0.29 - 0.94))


def test_the_page_shows_the_numbers(rows: list[Row], about: dict) -> None:
    page = "\n".join(to_markdown(rows, about))
    assert "| method | 0 | 0.1 | 1 |" in page
    assert "| `random` | 21.0 (20-22) | 28.0 (27-29) | 91.0 (90-92) |" in page
    assert "| `full-reuse` | 21.0 (20-22) |  |  |" in page
    assert "| carry | exact match | 300 | 250 | 97.0 | 97.0 | 97.0 |" in page
    assert "not mastered)" not in page


def test_early_termination_and_grouping_have_a_table_of_their_own(rows: list[Row], about: dict) -> None:
    focus, group = MethodSpec("epic", FOCUS_OPTIONS), MethodSpec("epic", GROUP_OPTIONS)
    rows += [cell("one", Condition(focus, 0.1), 0.25, recomputed=0.1), cell("one", Condition(group, 0.1), 0.2)]
    rows = [row if row.method != "epic" else replace(row, recomputed=row.ratio) for row in rows]
    page = to_markdown(rows, about)
    table = page[page.index("### With early termination and grouping") :]
    assert table[5:] == [
        "| method | 0.1 |",
        "| --- | ---: |",
        "| `epic` | 28.0 (10.0) |",
        "| `epic:focus_window=3` | 25.0 (10.0) |",
        "| `epic:group_size=8,group_threshold=5` | - |",
    ]
    assert sum("focus_window" in line for line in page) == 1


def test_by_default_every_method_that_selects_is_asked_with_both() -> None:
    conditions = [c for c in wanted_conditions(parse_args([])) if c.method is not None and c.method.is_composed]
    selecting = {name for name in METHODS_OF_ANY_SERVER if METHODS[name].effective_ratio(0.3, 0.3) == 0.3}
    assert {c.method.method for c in conditions if c.method} == selecting
    assert len(conditions) == len(selecting) * 2 * len(COMPOSED_RATIOS)
    assert wanted_conditions(parse_args(["--methods", "epic", "--ratios", "0.15"])) == [
        Condition(MethodSpec("epic"), 0.15)
    ]


def test_a_family_that_is_not_mastered_is_marked(rows: list[Row], about: dict) -> None:
    rows = [replace(row, mastered=False, scored="full-right", num_scored=250, score_all=0.8333) for row in rows]
    page = "\n".join(to_markdown(rows, about))
    assert "83.3 (not mastered)" in page
    assert "Scored are only prompts that the full prefill of the same model answers right." in page


def test_nothing_to_score_still_shows_the_kl(about: dict, tmp_path: Path) -> None:
    rows = [
        replace(TEMPLATE, score=None, mastered=False, num_scored=0),
        replace(
            cell("m", Condition(MethodSpec("epic"), 0.1), 0.5), score=None, diff=None, diff_low=None, diff_high=None
        ),
    ]
    page = to_markdown(rows, about)
    assert [line for line in page if line.startswith("| `epic`")] == [
        "| `epic` | - |",
        "| `epic` | - |",
        "| `epic` | 0.5 |",
    ]


def test_files_are_made_again_from_the_csv(rows: list[Row], about: dict, tmp_path: Path) -> None:
    rows += [replace(row, family="own/data set") for row in rows]
    written = {path.name for path in write_report(tmp_path, rows, about)}
    assert written == {"quality.csv", "quality.json", "quality.md"}
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "quality.md").unlink()
    assert main([str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_a_folder_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path}: no result of evaluate.py" in capsys.readouterr().err


def test_a_point_needs_a_value() -> None:
    assert Point.of([None, None]) is None
    assert Point.of([None, 2.0]) == Point(2.0, 2.0, 2.0)


def test_likelihood_says_from_which_ratio_on_the_loss_is_small() -> None:
    full = replace(TEMPLATE, family="own")
    losses = {0.0: (0.3, 0.2, 0.4), 0.1: (0.04, 0.01, 0.07), 0.5: (0.01, -0.02, 0.04)}
    found = [full] + [
        replace(
            cell("m", Condition(MethodSpec(name), ratio), 0.5), family="own", num_asked=100, gold_loss_se=0.05,
            gold_loss=mean + add, gold_loss_low=low + add, gold_loss_high=high + add, own_loss=0.0, own_loss_low=0.0,
            own_loss_high=0.0,
        )
        for name, add in (("epic", 0.0), ("random", 0.2))
        for ratio, (mean, low, high) in losses.items()
    ]  # fmt: skip
    page = to_markdown(found, {**describe_run(), "settings": {}})
    table = page[next(i for i, line in enumerate(page) if line.startswith("| method | mean | interval")) :]
    assert "| `epic` | 0.1 | 0.5 | 384 |" in table  # 100 x (1.96 x 0.05 / 0.05)^2
    assert "| `random` | none up to 0.5 | none up to 0.5 | 384 |" in table
    assert any("+0.040 [+0.010, +0.070]" in line for line in page)
    assert "### Likelihood" not in to_markdown([replace(row, gold_loss=None, own_loss=None) for row in found],
                                               {**describe_run(), "settings": {}})  # fmt: skip
