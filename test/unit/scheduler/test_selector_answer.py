"""cacheclip: who asks the selector, what a plan makes of its answer, and what serves a request without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from chunk_cache.errors import ChunkCacheConfigError
from chunk_cache.manager import ChunkManager
from chunk_cache.methods import METHODS, STAND_IN, num_rows_at
from chunk_cache.methods.base import AllReused
from chunk_cache.options.config import Config, parse_config
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selector_answer import NO_ANSWER, SelectorAnswer, asks_selector
from unit.scheduler.dict_store import TOKENS, DictStore, new_node, prompt_of
from unit.scheduler.plans import NOT_STORED, hit, plan_of

SPANS = [(10, 26), (30, 46)]
UNGROUPED = (("group_size", 0),)


def scores(*best: int) -> np.ndarray:
    """Of a chunk of 16 tokens: these are the best, in falling order."""
    found = np.zeros(16, dtype=np.float32)
    for rank, at in enumerate(best):
        found[at] = 1.0 - 0.01 * rank
    return found


def clip_plan(**given: Any) -> Any:
    return plan_of(SPANS, [hit(16), hit(16)], method="cacheclip", **given)


def recomputed(plan: Any) -> list[int]:
    return [position for chunk in plan.reply(explain=True)["chunks"] for position in chunk["recomputed_positions"]]


def test_one_budget_for_all_chunks_unless_asked_otherwise() -> None:
    rankings = [scores(3, 4, 5, 6), 0.5 * scores(0, 1)]
    plan = clip_plan(rankings=rankings, ratio=0.125, options=UNGROUPED)
    assert recomputed(plan) == [13, 14, 15, 16]
    plan = clip_plan(rankings=rankings, ratio=0.125, options=(*UNGROUPED, ("top_k", "chunk")))
    assert recomputed(plan) == [13, 14, 30, 31]
    assert (plan.method, plan.fallback_reason, plan.selection) == ("cacheclip", None, None)


def test_windows_keep_their_tokens_where_most_were_selected() -> None:
    rankings = [scores(*range(6), 9), scores(2, 3, 4)]
    plan = clip_plan(rankings=rankings, ratio=10 / 32)
    assert recomputed(plan) == [10, 11, 12, 13, 14, 15]  # six of the first window; 9 and the others are too few
    assert plan.num_recomputed == 6


def test_only_the_reused_part_is_ranked() -> None:
    rankings = [scores(0, 1, 12), scores(15, 7)]
    plan = plan_of(
        SPANS, [hit(16), hit(16)], method="cacheclip", prefix_len=20, rankings=rankings, ratio=3 / 22, options=UNGROUPED
    )
    assert recomputed(plan) == [22, 37, 45]
    plan = plan_of(SPANS, [NOT_STORED, hit(16)], method="cacheclip", rankings=rankings, ratio=2 / 16, options=UNGROUPED)
    assert recomputed(plan) == [37, 45]


@pytest.mark.parametrize("reason", ["selector_timeout", "selector_unavailable", "selector_failed", "selector_too_long"])
def test_the_stand_in_chooses_and_the_reply_says_so(reason: str) -> None:
    given = {"ratio": 0.25, "options": (("shift", 0), ("top_k", "chunk"))}
    plan = clip_plan(selector_reason=reason, **given)
    assert (plan.method, plan.ratio, plan.fallback_reason) == (STAND_IN, 0.25, reason)
    rows = METHODS[STAND_IN].rows_of_all(0.25, AllReused(SPANS, SPANS[-1][1])).tolist()
    assert recomputed(plan) == [[p for span in SPANS for p in range(*span)][row] for row in rows]
    assert {chunk.shift for chunk in plan.chunks} == {0}  # an option that both have


def test_what_the_scores_could_not_change_needs_none() -> None:
    for ratio in (0.0, 1.0):
        plan = clip_plan(selector_reason="selector_timeout", ratio=ratio)
        assert (plan.method, plan.fallback_reason, plan.num_recomputed) == ("cacheclip", None, 32 * ratio)
    plan = plan_of(SPANS, [NOT_STORED] * 2, method="cacheclip", selector_reason="selector_timeout", ratio=0.5)
    assert plan.fallback_reason is None


@pytest.mark.parametrize(
    ("opts", "method", "ratio", "expected"),
    [
        ({"method": "cacheclip"}, "epic", 0.15, True),
        ({}, "cacheclip", 0.15, True),
        ({"method": "epic"}, "cacheclip", 0.15, False),
        ({"method": "cacheclip", "ratio": 0.0}, "epic", 0.15, False),
        ({"method": "cacheclip", "ratio": 1.0}, "epic", 0.15, False),
        ({"method": "cacheclip", "ratio": 0.3}, "epic", 1.0, True),
        ({"method": "cacheclip"}, "epic", 1.0, False),
        ({"method": "cacheclip", "mode": "exact"}, "epic", 0.15, False),
        ({"method": "cacheclip", "mode": "off"}, "epic", 0.15, False),
        ({"method": "cacheclip", "spans": ()}, "epic", 0.15, False),
    ],
)
def test_who_asks(opts: dict[str, Any], method: str, ratio: float, expected: bool) -> None:
    assert asks_selector(RequestOptions(**{"spans": ((0, 4),), **opts}), method, ratio) == expected


def test_an_answer_is_scores_or_a_known_reason() -> None:
    with pytest.raises(AssertionError, match="'tired'"):
        SelectorAnswer(None, "tired", 0.0)
    with pytest.raises(AssertionError):
        SelectorAnswer((scores(1),), "selector_timeout", 0.0)


def test_the_manager_plans_anew_when_the_answer_comes() -> None:
    store = DictStore()
    manager = ChunkManager(Config(), store, method="cacheclip", ratio=0.5)
    prompt, tokens = prompt_of([0, 1])
    for keep in list(manager.remember_exact(prompt, None, in_tree=0, up_to=len(tokens))):
        home = new_node(TOKENS[keep.chunk])
        store.put(home, len(TOKENS[keep.chunk]))
        manager.complete(prompt, keep, home)
    where = {"prompt_len": len(tokens) + 3, "prefix_len": 0, "max_prefix_len": len(tokens) + 2}
    before = manager.plan(prompt, **where)
    assert (before.method, before.fallback_reason) == (STAND_IN, NO_ANSWER)
    rankings = tuple(np.arange(end - start, dtype=np.float32) for start, end in prompt.options.spans)
    prompt = dataclasses.replace(prompt, answer=SelectorAnswer(rankings, None, 0.1))
    after = manager.plan(prompt, **where)
    assert (after.method, after.fallback_reason) == ("cacheclip", None)
    assert manager.plan(prompt, **where) is after


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "--chunk-cache-config: selector: 7 is not an object; give an object with some of timeout_s, "),
        ({"model": "x"}, "--chunk-cache-config: selector.model: unknown key 'model'; known keys: timeout_s, "),
        ({"timeout_s": 0}, "--chunk-cache-config: selector.timeout_s: 0 is not a number of at least 0.001; "),
        ({"timeout_s": True}, "--chunk-cache-config: selector.timeout_s: true is not a number"),
        ({"max_bytes": "much"}, "--chunk-cache-config: selector.max_bytes: 'much' is not a number of bytes; "),
        ({"num_threads": -1}, "--chunk-cache-config: selector.num_threads: -1 is not an integer in [0, 1024]; "),
        ({"num_threads": 1.0}, "--chunk-cache-config: selector.num_threads: 1.0 is not an integer"),
    ],
)
def test_bad_keys_of_the_selector(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheConfigError) as caught:
        parse_config({"selector": value})
    assert str(caught.value).startswith(message)


def test_keys_of_the_selector() -> None:
    config = parse_config({"selector": {"timeout_s": 2, "max_bytes": "1GB", "num_threads": 3}}).selector
    assert (config.timeout_s, config.max_bytes, config.num_threads) == (2.0, 10**9, 3)


# Windows.


@pytest.mark.parametrize("top_k", ["global", "chunk"])
@pytest.mark.parametrize("seed", range(30))
def test_a_budget_of_kept_tokens_is_the_largest_choice_that_windows_leave_within_it(top_k: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rankings = [rng.integers(0, 9, 16).astype(np.float32), rng.random(16, dtype=np.float32)]
    ratio, prefix_len = float(rng.random()), int(rng.choice((0, 5)))
    windows = (("group_size", 4), ("group_threshold", 2), ("top_k", top_k))

    def rows_of(ratio: float, budget: str) -> tuple[RecomputePlan, list[set[int]]]:
        options = tuple(sorted((*windows, ("group_budget", budget))))
        given = {"prefix_len": prefix_len, "rankings": rankings, "ratio": ratio, "options": options}
        plan = plan_of(SPANS, [hit(16), hit(16)], method="cacheclip", **given)
        spans = [range(chunk.dst_start, chunk.dst_end) for chunk in plan.chunks]
        return plan, [set(plan.row_positions.tolist()).intersection(span) for span in spans]

    plan, kept = rows_of(ratio, "kept")
    lens = [chunk.num_reused for chunk in plan.chunks]
    for part in ([0], [1]) if top_k == "chunk" else ([0, 1],):
        num_tokens = sum(lens[i] for i in part)
        budget = num_rows_at(ratio, num_tokens)
        choices = [rows_of(num / num_tokens, "chosen")[1] for num in range(budget, num_tokens + 1)]
        within = [choice for choice in choices if sum(len(choice[i]) for i in part) <= budget]
        assert [kept[i] for i in part] == [within[-1][i] for i in part]


def test_windows_that_fill_the_budget_leave_many_times_what_they_leave_of_it() -> None:
    """A score of the size of noise in each token: hardly a window has six of eight chosen by chance."""
    ranking = np.random.default_rng(0).random(800, dtype=np.float32)
    counts = []
    for budget in ("chosen", "kept"):
        options = (("group_budget", budget),)
        plan = plan_of(
            [(0, 800)], [hit(800)], prompt_len=900, method="cacheclip", rankings=[ranking], ratio=0.2, options=options
        )
        counts.append(plan.num_recomputed)
    assert counts[0] < 10
    assert 150 <= counts[1] <= 160
