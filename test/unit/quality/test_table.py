"""Table: scores, paired differences and what is scored, worked out by hand; checks of the implementation."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.quality.checks import check_rows
from benchmark.quality.conditions import FULL_REUSE, NO_SHIFT
from benchmark.quality.experiment import Experiment, table_of
from benchmark.quality.question import DataError, Question
from benchmark.quality.table import DEFAULT, Row, read_table, tabulate, write_table
from benchmark.quality.tasks import Task

from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec
from chunk_cache_tools.verify.reply_log import Forced, Reply, ReplyLog
from chunk_cache_tools.verify.session import Asking

EPIC = Condition(MethodSpec("epic"), 0.3)


def make_rows(
    full: str,
    epic: str,
    *,
    metric: str = "exact_match",
    kls: list[float] | None = None,
    answers: tuple[str, ...] = ("a",),
) -> tuple[Row, Row]:
    """Rows of the reference and of `epic`: one letter per prompt is its reply; `answers` are right for all prompts."""
    asked = [(Question("", ("c",), "q", answers), f"p{i}") for i in range(len(full))]
    replies = {
        condition: {
            key: Reply(key, condition.label, condition.ratio, text, ord(text), 100, 60, 20 * (i % 2), kl)
            for i, ((_, key), text, kl) in enumerate(zip(asked, texts, values, strict=True))
        }
        for condition, texts, values in (
            (REFERENCE, full, [None] * len(full)),
            (EPIC, epic, kls or [0.5] * len(full)),
        )
    }
    reference, row = tabulate("m", "f", metric, asked, replies, [EPIC])
    return reference, row


def test_a_mastered_family_scores_all_prompts() -> None:
    full, epic = make_rows("a" * 19 + "b", "a" * 15 + "c" * 4 + "a")
    assert (full.method, full.ratio, full.mastered, full.scored, full.num_scored) == ("off", None, True, "all", 20)
    assert full.score == pytest.approx(0.95)
    assert full.diff is None
    assert full.kl is None
    assert epic.score == epic.score_all == pytest.approx(0.8)
    assert epic.score_se == pytest.approx((0.8 * 0.2 / 19) ** 0.5)
    assert epic.diff == pytest.approx((1 - 4) / 20)
    assert epic.diff_low < epic.diff < epic.diff_high
    assert epic.text_same == epic.first_same == pytest.approx(15 / 20)
    assert epic.recomputed == pytest.approx(1 / 6)


def test_losses_of_likelihood_are_paired() -> None:
    """One prompt has no answer of its own, and counts for the right one only; the default is compared with too."""
    asked = [(Question("", ("c",), "q", ("a",)), f"p{i}") for i in range(3)]
    logprobs = {
        REFERENCE: ((-1.0, -0.1), (-2.0, None), (-3.0, -0.3)),
        DEFAULT: ((-1.25, -0.1), (-2.0, None), (-3.5, -0.3)),
        EPIC: ((-1.5, -0.1), (-2.0, None), (-4.0, -0.5)),
    }
    replies = {
        condition: {
            f"p{i}": Reply(
                f"p{i}", condition.label, condition.ratio, "a", 1, 100, 60, 20,
                gold=Forced(2, gold), own=None if own is None else Forced(4, own),
            )
            for i, (gold, own) in enumerate(values)
        }
        for condition, values in logprobs.items()
    }  # fmt: skip
    full, default, epic = tabulate("m", "f", "exact_match", asked, replies, [DEFAULT, EPIC])
    assert full.gold_more is default.gold_more is None
    assert epic.gold_more == pytest.approx((0.25 + 0.0 + 0.5) / 3)
    assert epic.gold_more_low == pytest.approx(0.0, abs=0.1)
    assert full.gold_loss is full.own_loss is None
    assert epic.gold_loss == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert epic.own_loss == pytest.approx((0.0 + 0.2) / 2)
    assert epic.gold_loss_se == pytest.approx((0.25 / 3) ** 0.5)
    assert epic.gold_loss_low < epic.gold_loss < epic.gold_loss_high


def test_intervals_against_the_default_hold_together() -> None:
    asked = [(Question("", ("c",), "q", ("a",)), f"p{i}") for i in range(40)]
    others = [EPIC, *(Condition(MethodSpec("epic"), ratio) for ratio in (0.1, 0.2, 0.4))]
    replies = {
        condition: {
            key: Reply(key, condition.label, condition.ratio, "a", 1, 100, 60, 20, gold=Forced(1, -shift * (i % 7)))
            for i, (_, key) in enumerate(asked)
        }
        for condition, shift in ((REFERENCE, 0.0), (DEFAULT, 0.0), *((other, 0.5) for other in others))
    }
    _, _, alone = tabulate("m", "f", "exact_match", asked, replies, [DEFAULT, EPIC])
    _, _, together, *_ = tabulate("m", "f", "exact_match", asked, replies, [DEFAULT, *others])
    assert together.gold_more == alone.gold_more
    assert together.gold_more_low < alone.gold_more_low < alone.gold_more_high < together.gold_more_high
    assert together.gold_loss_low == alone.gold_loss_low


def test_questions_of_several_tasks_are_joined(tmp_path: Path) -> None:
    """Of two tasks only conditions that both were asked under are joined."""
    likelihood = Asking(max_new_tokens=1, stop=(), likelihood=True)
    with ExitStack() as stack:
        experiments = []
        for family, conditions in (("one", [EPIC, DEFAULT]), ("two", [EPIC])):
            questions = tuple(Question("", (f"{family} {i}",), "q", ("a",)) for i in range(2))
            task = Task(family, questions, "exact_match", likelihood)
            log = stack.enter_context(ReplyLog(tmp_path / family, {}))
            experiments.append(Experiment("m", task, task.prompts(), log))
            for i, prompt in enumerate(experiments[-1].prompts):
                for c in (REFERENCE, *conditions):
                    gold = Forced(1, -1.0 if c == REFERENCE else -2.0 - i)
                    log.append([Reply(prompt.key, c.label, c.ratio, "a", 1, 100, 60, 20, gold=gold)])
        _, joined = table_of("both", experiments)
    assert (joined.family, joined.method, joined.num_asked) == ("both", "epic", 4)
    assert joined.gold_loss == pytest.approx(1.5)


def test_a_family_that_is_not_mastered_scores_what_full_gets_right() -> None:
    full, epic = make_rows("a" * 10 + "b" * 10, "a" * 8 + "b" * 2 + "a" * 10)
    assert (full.mastered, full.scored, full.num_asked, full.num_scored) == (False, "full-right", 20, 10)
    assert (full.score, full.score_all) == (1.0, 0.5)
    assert (epic.score, epic.score_all) == (pytest.approx(0.8), pytest.approx(0.9))
    assert epic.diff == pytest.approx(-0.2)
    assert epic.exact_match == pytest.approx(0.8)


def test_a_metric_of_degree_scores_all_prompts() -> None:
    full, epic = make_rows("ab", "ab", metric="token_f1")
    assert (full.mastered, full.scored, full.score, epic.score) == (False, "all", 0.5, 0.5)


def test_a_metric_of_degree_also_scores_what_full_gets_right() -> None:
    full, epic = make_rows("aaaabb", "aaabab", metric="token_f1")
    assert (full.num_right, full.right_diff) == (4, None)
    assert (epic.num_right, epic.right_diff) == (4, -0.25)
    assert (epic.right_diff_low, epic.right_diff_high) == (-0.75, 0.0)
    assert epic.diff == 0.0
    assert make_rows("aab", "abb")[1].num_right == 0


def test_a_question_without_answers_is_scored_against_the_full_prefill_s_own_reply() -> None:
    full, epic = make_rows("xyzu", "xyza", metric="rouge_l", answers=())
    assert (full.score, epic.score) == (1.0, 0.75)


def test_nothing_right_leaves_nothing_to_score() -> None:
    full, epic = make_rows("bb", "ab")
    assert (full.num_scored, full.score, epic.score, epic.diff, epic.diff_low) == (0, None, None, None, None)
    assert epic.score_all == 0.5


def test_equal_replies_give_an_interval_of_zero() -> None:
    _, epic = make_rows("aaaa", "aaaa", kls=[0.1, 0.2, 0.3, 0.4])
    assert (epic.diff, epic.diff_low, epic.diff_high) == (0.0, 0.0, 0.0)
    assert epic.kl == pytest.approx(0.25)
    assert epic.kl_se == pytest.approx(0.0645, abs=1e-4)


def test_the_interval_covers_the_difference_of_a_known_population() -> None:
    """Of 40 samples of 200 prompts with a true difference of -0.1, at least 33 intervals must hold it."""
    import random

    draw = random.Random(0)
    covered = 0
    for _ in range(40):
        _, epic = make_rows("a" * 200, "".join("b" if draw.random() < 0.1 else "a" for _ in range(200)))
        covered += epic.diff_low <= -0.1 <= epic.diff_high
    assert covered >= 33


def test_a_table_is_read_back(tmp_path: Path) -> None:
    rows = [*make_rows("a" * 19 + "b", "a" * 20), *make_rows("bb", "ab")]
    write_table(tmp_path / "t.csv", rows)
    back = read_table(tmp_path / "t.csv")
    assert [(row.score, row.diff) for row in back] == [(row.score, row.diff) for row in rows]
    write_table(tmp_path / "again.csv", back)
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "t.csv").read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [("yes", "maybe", ":2: not a row"), ("method", "way", ":2: not a row"), ("epic,0.3", "epic,x", ":3: not a row")],
)
def test_a_broken_table_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "t.csv"
    write_table(path, make_rows("aa", "aa"))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError) as error:
        read_table(path)
    assert str(error.value).startswith(f"{path}{problem}")


def test_checks_hold_where_the_numbers_say_so_and_only_there() -> None:
    rows = good_rows()
    assert [check.holds for check in check_rows(rows)] == [True] * 6
    for family, method, ratio, changes, statement in (
        ("needle", "off", None, {"mastered": False}, "of `needle` right"),
        ("needle", "random", 1.0, {"text_same": 0.99}, "ratio 1.0 gives"),
        ("carry", "random", 1.0, {"kl": 1e-3}, "ratio 1.0 gives"),
        ("multi", NO_SHIFT.label, 0.0, {"score": 0.7}, "`multi` collapses"),
        ("multi", FULL_REUSE.label, 0.0, {"score": 0.4}, "`multi` collapses"),
        ("carry", FULL_REUSE.label, 0.0, {"score": 0.7}, "`carry` collapses"),
        ("carry", "random", 0.5, {"score": 0.3}, "`carry` collapses"),
    ):
        changed = [
            replace(row, **changes) if (row.family, row.method, row.ratio) == (family, method, ratio) else row
            for row in rows
        ]
        failed = [check.statement for check in check_rows(changed) if not check.holds]
        assert len(failed) == 1, (family, method, ratio, failed)
        assert statement in failed[0]


def test_checks_are_made_only_of_what_was_measured() -> None:
    assert check_rows([row for row in good_rows() if row.family == "needle" and row.ratio != 1.0]) == [
        check for check in check_rows(good_rows()) if "`needle`" in check.statement
    ]
    assert check_rows(make_rows("aa", "ab")) == []


def good_rows() -> list[Row]:
    full, other = make_rows("a" * 20, "a" * 20, kls=[0.0] * 20)
    scores = {
        ("multi", NO_SHIFT.label, 0.0): 0.3,
        ("multi", FULL_REUSE.label, 0.0): 0.9,
        ("carry", FULL_REUSE.label, 0.0): 0.2,
        ("carry", "random", 0.1): 0.25,
        ("carry", "random", 0.5): 0.6,
        ("carry", "random", 1.0): 1.0,
        ("needle", "random", 1.0): 1.0,
    }
    rows = [replace(full, family=family) for family in ("needle", "multi", "carry")]
    return rows + [
        replace(other, family=family, method=method, ratio=ratio, score=score)
        for (family, method, ratio), score in scores.items()
    ]
