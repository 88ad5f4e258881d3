"""A plan in steps, against what it says as a whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from chunk_cache.plan.plan_steps import PlanStep, needs_steps, next_step, part_of
from chunk_cache.plan.planning import replan_without_load
from chunk_cache.plan.recompute_plan import RecomputePlan
from unit.scheduler.plans import NOT_STORED, hit, outcome, plan_of


def random_plan(seed: int) -> RecomputePlan:
    rng = random.Random(seed)
    spans, at = [], rng.choice([0, 5, 200])
    for _ in range(rng.randint(1, 6)):
        spans.append((at, at + rng.randint(1, 90)))
        at = spans[-1][1] + rng.choice([0, 0, 3, 150])
    lookups = [hit(end - start) if rng.random() < 0.7 else NOT_STORED for start, end in spans]
    ratio, page_size = rng.choice([0.0, 0.1, 0.3, 1.0]), rng.choice([1, 1, 4, 16])
    return plan_of(spans, list(lookups), ratio=ratio, page_size=page_size, prompt_len=at + rng.randint(1, 99))


@pytest.mark.parametrize("seed", range(300))
def test_steps_bring_in_and_compute_what_the_plan_says(seed: int) -> None:
    plan = random_plan(seed)
    most = random.Random(-seed).choice([1, 16, 33, 64])
    if not plan.load_len or not needs_steps(plan, most):
        return
    at, computed, brought = 0, [], []
    while at < plan.load_end:
        step = next_step(plan, at, most)
        assert at <= step.load_end <= plan.load_end
        rows: list[int] = []
        if step.load_end > at:
            part = part_of(plan, at, step.load_end)
            rows = part.row_positions.tolist()
            assert (part.load_start, part.load_end) == (at, step.load_end)
            assert len(rows) == part.load_len - part.num_reused + part.num_recomputed
            for chunk in part.chunks:
                if chunk.num_reused:
                    whole = next(one for one in plan.chunks if one.start == chunk.start)
                    assert chunk.dst_start - chunk.src_offset == whole.dst_start - whole.src_offset
                    assert (chunk.variant_id, chunk.shift) == (whole.variant_id, whole.shift)
                    brought += set(range(chunk.dst_start, chunk.dst_end)) - set(rows)
        end = min(step.load_end + most - len(rows), plan.prompt_len) if step.end is None else step.end
        assert step.load_end < end
        assert len(rows) + end - step.load_end <= most
        computed += [*rows, *range(step.load_end, end)]
        at = end
    assert sorted([*computed, *brought]) == list(range(at)), "each once"
    assert computed == [*plan.row_positions.tolist(), *range(plan.load_end, at)]


def test_new_text_is_computed_as_without_chunks_and_the_load_comes_in_the_last_step() -> None:
    plan = plan_of([(4000, 4050)], [hit(50)], ratio=0.1, prompt_len=4070)
    assert needs_steps(plan, 128)
    assert not needs_steps(plan, 4096)
    assert not needs_steps(plan, None)
    assert [next_step(plan, at, 128) for at in (0, 3840, 3968)] == [
        PlanStep(0, 128),
        PlanStep(3840, 3968),
        PlanStep(4050, None),
    ]


def test_what_follows_the_load_is_cut_only_where_it_is_longer_than_a_step() -> None:
    plan = plan_of([(0, 100)], [hit(100)], ratio=1.0, prompt_len=120)
    assert [next_step(plan, at, 64) for at in (0, 64)] == [PlanStep(0, 64), PlanStep(100, None)]
    assert next_step(plan, 50, 64) == PlanStep(50, 100)
    assert next_step(plan_of([(0, 100)], [hit(100)], ratio=1.0, prompt_len=190), 50, 64) == PlanStep(100, None)


def test_what_the_forward_chooses_is_brought_in_whole_behind_the_text_in_front() -> None:
    given = {"method": "cacheblend", "prompt_len": 500, "max_unknown_rows": 1000, "step_len": 64}
    plan = plan_of([(200, 300), (320, 400)], [hit(100), hit(80)], ratio=0.1, page_size=16, **given)
    assert plan.selection is not None
    assert needs_steps(plan, 64)
    assert [next_step(plan, at, 64) for at in (64, 192, 200)] == [
        PlanStep(64, 128),
        PlanStep(192, 200),
        PlanStep(400, None),
    ]
    part = part_of(plan, 200, 400)
    assert (part.chunks, part.selection, part.num_recomputed) == (plan.chunks, plan.selection, plan.num_recomputed)
    assert not needs_steps(plan_of([(0, 300)], [hit(300)], ratio=0.1, **given), 64), "there is no such text"


def test_a_plan_of_which_the_rest_is_not_brought_in() -> None:
    plan = plan_of([(10, 30), (30, 50), (60, 90)], [hit(20), hit(20), hit(30)], ratio=0.1)
    cut = replan_without_load(plan, "evicted", 40)
    assert outcome(cut) == [("hit", None, 20), ("hit", None, 10), ("skipped", "evicted", 0)]
    assert cut.row_positions.tolist() == [*range(10), 10, 11, 30, 31]
    assert (cut.load_end, cut.num_reused, cut.num_recomputed, cut.fallback_reason) == (40, 30, 4, None)
    assert np.array_equal(replan_without_load(plan, "evicted").row_positions, [])
