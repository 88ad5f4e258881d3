"""Plans of methods that choose or drop rows during the forward, and of grouping and rankings, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from chunk_cache.methods import METHODS, STAND_IN, Stage
from chunk_cache.options.request_options import parse_request
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selection_plan import Selection, is_selecting, question_of
from unit.scheduler.plans import NOT_STORED, hit, outcome, plan_of

SPANS = [(4, 24), (30, 50), (50, 60)]
LAYER = pytest.mark.parametrize("method", ["cacheblend", "a3"])
SCORED = pytest.mark.parametrize("method", ["cacheblend", "a3", "fusionrag"])
GAPS = [*range(4), *range(24, 30), *range(50, 60)]


def scored(method: str, ratio: float, **given: Any) -> RecomputePlan:
    """Two chunks of 20 tokens that are found, one of 10 behind them that is not, a hit of 8 behind that."""
    spans, lookups = [*SPANS, (60, 68)], [hit(20), hit(20), NOT_STORED, hit(8)]
    return plan_of(spans, lookups, method=method, ratio=ratio, **given)


@LAYER
def test_a_method_that_chooses_at_a_layer_begins_with_all_rows_of_the_load(method: str) -> None:
    plan = scored(method, 0.25)
    assert plan.row_positions.tolist() == list(range(68))
    assert (plan.num_recomputed, plan.num_late_rows, plan.num_load_rows) == (12, 0, 68)
    assert (plan.num_reused, plan.num_computed, plan.num_rows) == (48, 52, 100)
    assert plan.selection == Selection(method, (), 0.25, (48,), (68, 100))
    assert plan.selection.stage is Stage.LAYER


def test_a_method_that_asks_first_begins_with_what_is_missing() -> None:
    plan = scored("fusionrag", 0.25)
    assert plan.row_positions.tolist() == GAPS
    assert (plan.num_recomputed, plan.num_late_rows, plan.num_load_rows) == (12, 12, 32)
    assert (plan.num_reused, plan.num_computed, plan.num_rows) == (48, 52, 64)
    assert (plan.num_asking, scored("a3", 0.25).num_asking, scored("fusionrag", 1.0).num_asking) == (52, 0, 0)
    assert plan.selection == Selection("fusionrag", (), 0.25, (48,), (68, 100))
    assert plan.selection.stage is Stage.QUESTION


# The rows of the load, and what must be computed with them: a page, or the question.
@pytest.mark.parametrize(("method", "num_rows"), [("cacheblend", 68 + 1), ("a3", 68 + 32), ("fusionrag", 32 + 32)])
def test_a_method_that_begins_with_too_many_rows_leaves_them_to_the_stand_in(method: str, num_rows: int) -> None:
    assert scored(method, 0.25, max_unknown_rows=num_rows).method == method
    plan = scored(method, 0.25, max_unknown_rows=num_rows - 1)
    assert (plan.method, plan.fallback_reason) == (STAND_IN, "too_many_rows")
    assert (plan.selection, plan.num_late_rows) == (None, 0)
    assert 0 < plan.num_recomputed < plan.num_reused == 48


@pytest.mark.parametrize("method", ["cacheblend", "fusionrag"])
def test_what_stands_in_works_between_no_layers(method: str) -> None:
    options = (("drift", 0.5), ("focus_window", 3))
    plan = scored(method, 0.25, max_unknown_rows=1, options=options)
    assert (plan.method, plan.fallback_reason, plan.selection) == (STAND_IN, "too_many_rows", None)


@pytest.mark.parametrize("method", ["a3", "fusionrag", "infoflow", "question-drift"])
def test_a_question_that_comes_in_a_later_step_is_not_waited_for(method: str) -> None:
    assert scored(method, 0.25, step_len=32).method == method
    plan = scored(method, 0.25, step_len=31)
    assert (plan.method, plan.fallback_reason, plan.selection) == (STAND_IN, "question_in_parts", None)
    assert plan.num_recomputed > 0


@pytest.mark.parametrize("method", ["cacheblend", "epic", "full-reuse"])
def test_methods_that_do_not_read_it_do_not_care(method: str) -> None:
    assert scored(method, 0.25, step_len=1).method == method


def test_rows_that_are_known_may_be_any_number() -> None:
    assert scored("epic", 0.25, max_unknown_rows=1).fallback_reason is None


@SCORED
@pytest.mark.parametrize("ratio", [0.0, -0.0])
def test_at_ratio_zero_nothing_is_chosen(method: str, ratio: float) -> None:
    plan = scored(method, ratio, options=(("focus_window", 3), ("group_size", 8)))
    assert plan.row_positions.tolist() == GAPS
    assert (plan.selection, plan.num_late_rows, plan.num_recomputed) == (None, 0, 0)


@pytest.mark.parametrize("method", ["cacheblend", "a3", "fusionrag", "epic", "cache-craft"])
@pytest.mark.parametrize("ratio", [1.0, 0.99])  # 0.99 of 48 rounds up to all, and of 20 and 8
def test_where_the_budget_is_all_rows_nothing_is_chosen(method: str, ratio: float) -> None:
    plan = scored(method, ratio, options=(("focus_window", 3), ("group_size", 8)))
    assert plan.row_positions.tolist() == list(range(68))
    assert (plan.selection, plan.num_late_rows, plan.num_recomputed) == (None, 0, 48)


@SCORED
def test_any_ratio_above_zero_recomputes_at_least_one_token(method: str) -> None:
    plan = scored(method, 1e-9)
    assert plan.num_recomputed == 1
    assert plan.selection is not None


@SCORED
def test_without_a_hit_nothing_is_chosen(method: str) -> None:
    plan = plan_of([(0, 40)], [NOT_STORED], method=method, ratio=0.5)
    assert (plan.selection, plan.num_late_rows, plan.num_recomputed, plan.num_rows) == (None, 0, 0, 100)


@SCORED
def test_a_budget_for_each_chunk(method: str) -> None:
    plan = scored(method, 0.11, options=(("top_k", "chunk"),))
    assert plan.selection is not None
    assert plan.selection.segment_lens == (20, 20, 8)
    assert plan.num_recomputed == 3 + 3 + 1  # of all 48 it would be 6
    assert scored(method, 0.11).num_recomputed == 6
    counts = plan.selection.layer_counts(12)
    assert len(counts) == 12
    if method != "cacheblend":
        assert counts[-1] == (3, 3, 1)


@SCORED
def test_a_budget_for_each_chunk_may_be_all_of_each(method: str) -> None:
    plan = scored(method, 0.96, options=(("top_k", "chunk"),))
    assert (plan.selection, plan.num_recomputed) == (None, 48)


def test_what_the_load_does_not_bring_in_is_no_part_of_the_budget() -> None:
    plan = plan_of([(4, 24), (30, 50)], [hit(20), hit(20, 6)], method="a3", ratio=0.5, prefix_len=8, page_size=2)
    assert outcome(plan) == [("hit", None, 16), ("hit", None, 6)]
    assert plan.selection is not None
    assert (plan.selection.segment_lens, plan.num_recomputed) == ((22,), 11)
    assert plan.row_positions.tolist() == list(range(8, 36))


# What is told of the choice.


@SCORED
def test_the_reply_names_no_positions_that_only_the_forward_finds(method: str) -> None:
    chunks = scored(method, 0.25).reply(explain=True)["chunks"]
    assert [chunk["recomputed_positions"] for chunk in chunks] == [[], [], [], []]  # type: ignore[attr-defined]
    everything = scored(method, 1.0).reply(explain=True)["chunks"]
    assert [chunk["recomputed_positions"] for chunk in everything] == [  # type: ignore[attr-defined]
        [*range(4, 24)],
        [*range(30, 50)],
        [],
        [*range(60, 68)],
    ]


def test_the_reply_names_the_positions_that_were_chosen_before_the_forward() -> None:
    chunks = scored("epic", 0.1).reply(explain=True)["chunks"]
    assert [chunk["recomputed_positions"] for chunk in chunks] == [[4, 5], [30, 31], [], [60]]  # type: ignore[attr-defined]
    focused = scored("epic", 0.1, options=(("focus_window", 3),)).reply(explain=True)["chunks"]
    assert focused == chunks


@SCORED
def test_without_the_load_nothing_is_left_to_choose(method: str) -> None:
    bare = replan_without_load(scored(method, 0.25), "memory")
    assert (bare.selection, bare.num_late_rows, bare.num_recomputed, bare.num_load_rows) == (None, 0, 0, 0)
    assert (bare.num_rows, bare.method, bare.ratio) == (100, method, 0.25)
    assert all(chunk["recomputed_positions"] == [] for chunk in bare.reply(explain=True)["chunks"])  # type: ignore[attr-defined]


def test_plans_with_another_choice_are_not_equal() -> None:
    plans = [scored("a3", 0.25, options=options) for options in ((), (("check_layer", 2),), (("top_k", "chunk"),))]
    assert plans[0] == scored("a3", 0.25)
    assert plans[0] != plans[1]
    assert plans[0] != plans[2]


# Focus: rows that leave when their chunk loses it.


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.stage is Stage.BEFORE])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_focus_needs_rows_that_could_leave(method: str, ratio: float) -> None:
    options = (("focus_window", 3),)
    plan, plain = scored(method, ratio, options=options), scored(method, ratio)
    assert plain.selection is None
    np.testing.assert_array_equal(plan.row_positions, plain.row_positions)
    if 0 < plan.ratio < 1:
        assert plan.selection == Selection(method, options, 0.25, (), (68, 100))
        assert plan.selection.focus_window == 3
    else:
        assert plan.selection is None


def test_focus_without_a_chosen_row_has_nothing_to_drop() -> None:
    options = (("focus_window", 3), ("group_size", 8))
    plan = scored("epic", 0.1, options=options)  # grouping discards 2 of 8
    assert (plan.num_recomputed, plan.selection) == (0, None)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_is_selecting(method: Any) -> None:
    assert is_selecting(method, ()) == (method.stage is not Stage.BEFORE)
    assert is_selecting(method, (("focus_window", 0),)) == (method.stage is not Stage.BEFORE)
    assert is_selecting(method, (("focus_window", 1),))
    assert is_selecting(method, (("drift", 0.5),))


@pytest.mark.parametrize(
    ("spans", "prompt_len", "answer_tokens", "expected"),
    [
        ((), 10, 0, (0, 10)),
        (((0, 4),), 10, 0, (4, 10)),
        (((0, 4), (6, 9)), 10, 0, (9, 10)),
        (((0, 10),), 10, 0, (9, 10)),
        ((), 1, 0, (0, 1)),
        (((0, 1),), 1, 0, (0, 1)),
        (((0, 4),), 10, 2, (4, 8)),
        (((0, 4),), 10, 5, (4, 5)),
        (((0, 4),), 10, 6, (4, 5)),
        ((), 3, 3, (0, 1)),
    ],
)
def test_the_question_lies_between_chunks_and_answer(
    spans: Any, prompt_len: int, answer_tokens: int, expected: Any
) -> None:
    assert question_of(spans, prompt_len, answer_tokens) == expected


# Grouping of what is chosen before the forward.


def test_windows_are_discarded_at_once() -> None:
    given = {"method": "epic", "options": (("group_size", 8), ("group_threshold", 5))}
    plan = plan_of([(10, 50)], [hit(40)], ratio=0.25, **given)  # 10 rows: 8 and 2
    assert plan.row_positions.tolist() == [*range(10), *range(10, 18)]
    assert (plan.num_recomputed, plan.selection) == (8, None)
    assert plan.reply()["recomputed_tokens"] == 8


@pytest.mark.parametrize("method", METHODS)
def test_ratio_one_is_every_row_whatever_the_windows(method: str) -> None:
    plan = scored(method, 1.0, options=(("focus_window", 2), ("group_size", 64), ("group_threshold", 63)))
    expected = GAPS if method == "full-reuse" else list(range(68))
    assert plan.row_positions.tolist() == expected
    assert plan.selection is None


def test_windows_are_those_of_the_chunk_not_of_its_reused_part() -> None:
    given = {"method": "epic", "ratio": 0.75, "options": (("group_size", 4), ("group_threshold", 2))}
    plan = plan_of([(0, 16)], [hit(16)], prefix_len=6, **given)  # reused are 6 .. 15, chosen 6 .. 13
    assert plan.row_positions.tolist() == [*range(8, 12)]  # 6, 7 and 12, 13 are two of four


# Rankings.


def test_a_ranking_is_that_of_the_whole_chunk_and_cut_to_what_is_reused() -> None:
    ranking = np.array([9, 9, 9, 9, 0, 1, 5, 2, 0, 0, 0, 7, 9, 9, 9, 9], dtype=np.float32)
    plan = plan_of([(4, 20)], [hit(16, 12)], prefix_len=8, method="cache-craft", ratio=0.25, rankings=[ranking])
    assert outcome(plan) == [("hit", None, 8)]  # tokens 4 .. 11 of the chunk
    assert plan.row_positions.tolist() == [4 + 6, 4 + 11]
    assert plan.chunks[0].ranked_by == "outside"


def test_tokens_without_a_statistic_come_last_and_chunks_without_one_go_by_position() -> None:
    nan = math.nan
    rankings = [
        np.array([nan, nan, 1, 2, nan, 0, nan, nan], dtype=np.float32),
        np.full(8, nan, dtype=np.float32),
        None,
    ]
    spans = [(0, 8), (10, 18), (20, 28)]
    plan = plan_of(spans, [hit(8)] * 3, method="h2o", ratio=0.5, rankings=rankings)
    gaps = [8, 9, 18, 19]
    assert sorted(set(plan.row_positions.tolist()) - set(gaps)) == [0, 2, 3, 5, *range(10, 14), *range(20, 24)]
    assert [chunk.ranked_by for chunk in plan.chunks] == ["received", "position", "position"]
    assert [chunk["ranked_by"] for chunk in plan.reply()["chunks"]] == ["received", "position", "position"]  # type: ignore[attr-defined]


def test_only_hits_of_methods_that_rank_say_what_they_were_ranked_by() -> None:
    ranked = plan_of([(0, 8), (10, 18)], [hit(8), NOT_STORED], method="h2o")
    assert [chunk.ranked_by for chunk in ranked.chunks] == ["position", None]
    assert "ranked_by" not in plan_of([(0, 8)], [hit(8)], method="epic").reply()["chunks"][0]  # type: ignore[index]


# Shift.


def test_shift_zero_leaves_keys_at_their_old_phase() -> None:
    options = parse_request({"method": "epic", "options": {"shift": 0}}).options
    assert plan_of([(10, 30)], [hit(20, start=3)], method="epic", options=options).chunks[0].shift == 0
    assert plan_of([(10, 30)], [hit(20, start=3)], method="epic").chunks[0].shift == 7
