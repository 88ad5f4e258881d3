from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import shown_id
from chunk_cache.methods import Options
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.types import REASONS, Status
from unit.scheduler.plans import NOT_STORED, hit, outcome, plan_of


def test_request_without_marks_computes_everything() -> None:
    plan = plan_of([], [], prefix_len=10)
    assert (plan.load_start, plan.load_end, plan.num_rows, plan.fallback_reason) == (10, 10, 90, None)
    assert plan.reply() == {
        "prefix_tokens": 10,
        "reused_tokens": 0,
        "computed_tokens": 90,
        "recomputed_tokens": 0,
        "method": "epic",
        "ratio": 0.15,
        "fallback_reason": None,
        "chunks": [],
    }


def test_prefix_hit_miss_and_hit_in_one_prompt() -> None:
    spans = [(0, 10), (10, 30), (30, 50), (50, 70)]
    plan = plan_of(
        spans, [None, hit(20, start=4), NOT_STORED, hit(20, start=50, generation=2)], prefix_len=10, ratio=0.1
    )
    assert outcome(plan) == [("prefix", None, 0), ("hit", None, 20), ("miss", "not_stored", 0), ("hit", None, 20)]
    assert (plan.load_start, plan.load_end) == (10, 70)
    assert plan.row_positions.tolist() == [10, 11, *range(30, 50), 50, 51]
    assert (plan.num_recomputed, plan.num_reused, plan.num_computed, plan.num_rows) == (4, 40, 50, 54)
    assert [(c.src_offset, c.dst_start, c.shift, c.generation) for c in plan.chunks if c.num_reused] == [
        (0, 10, 6, 0),
        (0, 50, 0, 2),
    ]


def test_chunk_that_the_exact_prefix_cuts_brings_in_the_rest() -> None:
    plan = plan_of([(4, 24)], [hit(20, start=1)], prefix_len=16, page_size=4)
    chunk = plan.chunks[0]
    assert (chunk.status, chunk.src_offset, chunk.dst_start, chunk.num_reused, chunk.shift) == (
        Status.HIT,
        12,
        16,
        8,
        3,
    )
    assert plan.row_positions.tolist() == [16, 17]  # rows are counted from the first reused token


@pytest.mark.parametrize("options", [(), (("alpha", 0.1),), (("alpha", 2.0),)])
def test_no_request_weakens_what_the_server_has_computed(options: Options) -> None:
    plan = plan_of([(0, 40)], [hit(40, unit_cfo=0.9)], method="cache-craft", max_cfo=0.5, options=options)
    assert outcome(plan) == [("skipped", "high_cfo", 0)]


def test_case_2_all_hits_up_to_the_end_compute_the_last_token() -> None:
    plan = plan_of([(0, 50), (50, 100)], [hit(50), hit(50)], ratio=0.0)
    assert (plan.load_end, plan.num_reused, plan.num_rows) == (99, 99, 1)
    everything = plan_of([(0, 50), (50, 100)], [hit(50), hit(50)], max_prefix_len=100)
    assert everything.load_end == 99


def test_case_3_same_chunk_twice() -> None:
    lookup = hit(20, start=5)
    key = b"x" * 16
    plan = plan_of([(0, 20), (30, 50)], [lookup, lookup], method="random", ratio=0.25, chunk_keys=[key, key])
    assert [(c.status, c.num_reused, c.shift) for c in plan.chunks] == [(Status.HIT, 20, -5), (Status.HIT, 20, 25)]
    rows = plan.row_positions
    np.testing.assert_array_equal(rows[rows < 20] + 30, rows[rows >= 30])
    assert plan.num_recomputed == 10


def test_case_6_chunk_shorter_than_a_page() -> None:
    inside = plan_of([(3, 8), (20, 60)], [hit(5), hit(40)], page_size=16)
    assert outcome(inside) == [("hit", None, 5), ("hit", None, 28)]
    assert inside.load_end == 48
    alone = plan_of([(3, 8)], [hit(5)], page_size=16)
    assert outcome(alone) == [("skipped", "too_short", 0)]
    assert (alone.load_start, alone.load_end) == (0, 0)


def test_last_hits_that_rounding_leaves_nothing_of_are_skipped_one_after_the_other() -> None:
    plan = plan_of([(0, 20), (20, 24), (24, 30)], [hit(20), hit(4), hit(6)], page_size=16)
    assert outcome(plan) == [("hit", None, 16), ("skipped", "too_short", 0), ("skipped", "too_short", 0)]
    assert (plan.load_end, plan.num_reused) == (16, 16)


def test_partly_evicted_chunk_brings_in_what_is_left() -> None:
    plan = plan_of([(0, 20), (20, 40)], [hit(20, 8), hit(20)], ratio=0.0)
    assert outcome(plan) == [("hit", None, 8), ("hit", None, 20)]
    assert plan.row_positions.tolist() == list(range(8, 20))
    inside_the_prefix = plan_of([(0, 20)], [hit(20, 8)], prefix_len=8)
    assert outcome(inside_the_prefix) == [("miss", "not_stored", 0)]


def test_short_chunks_are_not_worth_reusing() -> None:
    plan = plan_of([(0, 9), (9, 29)], [hit(9), hit(20)], min_reuse_len=10)
    assert outcome(plan) == [("skipped", "too_short", 0), ("hit", None, 20)]


def test_chunk_behind_the_limit() -> None:
    spans, lookups = [(0, 20), (20, 40), (40, 60)], [hit(20), hit(20), hit(20)]
    plan = plan_of(spans, lookups, max_prefix_len=30, limit_reason="logprobs")
    assert outcome(plan) == [("hit", None, 20), ("hit", None, 10), ("skipped", "logprobs", 0)]
    paged = plan_of(spans, lookups, max_prefix_len=30, page_size=20)
    assert outcome(paged) == [("hit", None, 20), ("skipped", "prompt_end", 0), ("skipped", "prompt_end", 0)]
    last = plan_of([(99, 100)], [hit(1)])
    assert outcome(last) == [("skipped", "prompt_end", 0)]


def test_limit_inside_the_prefix_loads_nothing() -> None:
    plan = plan_of([(0, 60)], [hit(60)], prefix_len=32, max_prefix_len=16, page_size=16)
    assert (plan.load_start, plan.load_end) == (32, 32)
    assert outcome(plan) == [("skipped", "prompt_end", 0)]


def test_mode_exact_says_what_would_have_been_there() -> None:
    lookups = [None, hit(10), NOT_STORED, Lookup(None, 0, "evicted"), Lookup(None, 0, "generation_limit")]
    plan = plan_of([(i * 10, i * 10 + 10) for i in range(5)], lookups, mode="exact", prefix_len=10)
    reasons = [None, "exact_mode", "not_stored", "evicted", "exact_mode"]
    assert [(c.status.value, c.reason) for c in plan.chunks] == list(
        zip(["prefix", "skipped", "miss", "miss", "skipped"], reasons, strict=True)
    )
    assert (plan.load_end, plan.num_reused, plan.fallback_reason) == (10, 0, "exact_mode")


def test_mode_off_looks_nothing_up() -> None:
    plan = plan_of([(0, 10), (10, 20)], [None, None], mode="off", prefix_len=16, page_size=16)
    assert outcome(plan) == [("prefix", None, 0), ("skipped", "off", 0)]
    assert plan.fallback_reason == "off"


def test_generation_limit_is_stored_but_not_used() -> None:
    plan = plan_of([(0, 10)], [Lookup(None, 0, "generation_limit")])
    assert outcome(plan) == [("skipped", "generation_limit", 0)]


@pytest.mark.parametrize("method", ["full", "epic", "random"])
def test_ratio_one_recomputes_every_row_of_a_hit(method: str) -> None:
    plan = plan_of([(10, 90)], [hit(80)], method=method, ratio=1.0)
    assert outcome(plan) == [("hit", None, 80)]
    assert plan.row_positions.tolist() == list(range(90))
    assert (plan.num_recomputed, plan.num_rows, plan.ratio) == (80, 100, 1.0)


@pytest.mark.parametrize(
    ("given", "effective"),
    [
        ({}, ("epic", 0.15)),
        ({"ratio": 0.5}, ("epic", 0.5)),
        ({"method": "random"}, ("random", 0.15)),
        ({"method": "full", "ratio": 0.5}, ("full", 1.0)),
        ({"method": "full-reuse", "ratio": 0.5}, ("full-reuse", 0.0)),
        ({"default_method": "full"}, ("full", 1.0)),
        ({"default_ratio": 0.3}, ("epic", 0.3)),
    ],
)
def test_method_and_ratio_of_the_request_win(given: dict[str, Any], effective: tuple[str, float]) -> None:
    plan = plan_of([(0, 40)], [hit(40)], **given)
    assert (plan.method, plan.ratio) == effective
    assert (plan.reply()["method"], plan.reply()["ratio"]) == effective


def test_seed_of_the_request_changes_the_random_rows() -> None:
    plans = [plan_of([(0, 80)], [hit(80)], method="random", options=(("seed", s),)) for s in (0, 1, 1)]
    assert plans[0] != plans[1]
    assert plans[1] == plans[2]
    assert plan_of([(0, 80)], [hit(80)], method="random") == plans[0]


def test_without_the_load_everything_behind_the_prefix_is_computed() -> None:
    plan = plan_of([(0, 8), (8, 40), (40, 50)], [None, hit(32), NOT_STORED], prefix_len=8)
    bare = replan_without_load(plan, "memory")
    assert outcome(bare) == [("prefix", None, 0), ("skipped", "memory", 0), ("miss", "not_stored", 0)]
    assert (bare.load_start, bare.load_end, bare.num_rows, bare.num_computed) == (8, 8, 92, 92)
    assert bare.row_positions.dtype == np.int64
    assert (bare.fallback_reason, bare.reply()["fallback_reason"]) == ("memory", "memory")
    assert outcome(plan)[1] == ("hit", None, 32)


def test_reply_is_plain_json_and_explain_only_adds() -> None:
    plan = plan_of([(0, 40), (40, 50)], [hit(40, start=3), NOT_STORED])
    reply, explained = plan.reply(), plan.reply(explain=True)
    assert json.loads(json.dumps(reply)) == reply
    assert json.loads(json.dumps(explained)) == explained
    assert reply["chunks"] == [
        {"start": 0, "end": 40, "status": "hit", "reason": None, "variant": shown_id(7), "cfo": None, "kind": "alone"},
        {"start": 40, "end": 50, "status": "miss", "reason": "not_stored"},
    ]
    assert explained["explain"] == str(plan)
    assert explained["chunks"][0] == reply["chunks"][0] | {  # type: ignore[index]
        "generation": 0,
        "reused_tokens": 40,
        "shift": -3,
        "recomputed_positions": [0, 1, 2, 3, 4, 5],
    }


def test_plan_is_frozen_and_prints_as_a_table() -> None:
    plan = plan_of([(0, 40), (40, 50)], [hit(40, start=3), NOT_STORED])
    with pytest.raises(ValueError, match="read-only"):
        plan.row_positions[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.load_end = 3  # type: ignore[misc]
    text = str(plan)
    assert text.splitlines()[0] == "prompt 100 = prefix 0 + reused 40 + computed 60; load [0, 40)"
    assert text.splitlines()[1] == "rows 66; recomputed 6, computed 60; method epic, ratio 0.15, fallback -"
    assert text.splitlines()[3].split() == ["0", "40", "hit", "-", str(shown_id(7)), "0", "-", "0", "40", "-3"]
    assert text.splitlines()[4].split() == ["40", "50", "miss", "not_stored"]
    assert len({len(line) for line in text.splitlines()[2:4]}) == 1


def test_misuse_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="no lookup"):
        plan_of([(0, 10)], [None])
    with pytest.raises(AssertionError, match="whole pages"):
        plan_of([], [], prefix_len=3, page_size=2)
    with pytest.raises(AssertionError, match="outside the prompt"):
        plan_of([(0, 101)], [NOT_STORED])
    with pytest.raises(AssertionError, match="for the chunk"):
        plan_of([(0, 10)], [hit(11)])
    with pytest.raises(AssertionError, match="unknown reason"):
        ChunkPlan(0, 1, Status.MISS, "because")
    assert all(sentence.endswith(".") for sentence in REASONS.values())


def test_why_nothing_was_brought_in_is_the_reason_of_the_first_stored_chunk() -> None:
    spans = [(0, 10), (10, 20), (20, 30)]
    nothing = plan_of(spans, [NOT_STORED, Lookup(None, 0, "generation_limit"), NOT_STORED])
    assert nothing.fallback_reason == "generation_limit"
    logprobs = plan_of(spans, [hit(10)] * 3, max_prefix_len=0, limit_reason="logprobs")
    assert (logprobs.num_reused, logprobs.fallback_reason) == (0, "logprobs")
    assert plan_of(spans, [NOT_STORED] * 3).fallback_reason is None
    some = plan_of(spans, [hit(10), Lookup(None, 0, "generation_limit"), NOT_STORED])
    assert (some.num_reused, some.fallback_reason) == (10, None)


def test_options_of_the_server_count_where_the_request_leaves_them_out() -> None:
    server = (("ends", 2), ("group_size", 4), ("group_threshold", 1), ("seed", 3))

    def rows(**given: Any) -> list[int]:
        given = {"method": "lego-link", "default_options": server, "prefix_len": 10} | given
        return plan_of([(10, 30)], [hit(20)], **given).row_positions.tolist()

    assert rows() == [10, 11, 28, 29]
    assert rows(options=(("ends", 1),)) == []  # windows of which one token is not enough
    assert rows(options=(("ends", 1), ("group_size", 0))) == [10, 29]
    assert rows(ratio=0.3) == [10, 11, 12, 27, 28, 29]
    assert rows(method="epic", ratio=0.1) == [10, 11]
    assert plan_of([(10, 30)], [hit(20)], method="lego-link", default_options=server).ratio == 4 / 20
