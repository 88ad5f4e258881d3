"""Plans of prompts with images: an image is brought in whole or computed whole, and never computed again below 1."""

from __future__ import annotations

import itertools
import random

import pytest

from chunk_cache.methods import METHODS, STAND_IN
from chunk_cache.plan.image_spans import num_within
from chunk_cache.types import Status
from unit.scheduler.plans import NOT_STORED, hit, plan_of


def rows_within(plan, images):
    return [row for row in plan.row_positions if num_within(row, row + 1, images)]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("ratio", [0.15, 0.9])
def test_no_row_of_an_image_is_computed_again(method: str, ratio: float) -> None:
    images = [(15, 40), (60, 70)]
    plan = plan_of([(10, 50), (50, 80)], [hit(40), hit(30)], images=images, method=method, ratio=ratio, prompt_len=100)
    if plan.ratio == 1.0:  # full
        assert len(rows_within(plan, images)) == 35
        return
    assert not rows_within(plan, images)
    assert plan.reply()["reused_image_tokens"] == 35
    assert [chunk["reused_image_tokens"] for chunk in plan.reply()["chunks"]] == [25, 10]
    if METHODS[method].stage.name != "BEFORE":
        assert (plan.method, plan.fallback_reason) == (STAND_IN, "images")


@pytest.mark.parametrize("default_ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("option", [("drift", 0.5), ("focus_window", 2)])
@pytest.mark.parametrize(("method", "budget"), [("lego-link", ("ends", 5)), ("epic", ("alpha", 1.0))])
def test_nothing_is_corrected_or_dropped_beside_images_whatever_the_budget(
    method: str, budget: tuple[str, float], option: tuple[str, float], default_ratio: float
) -> None:
    images = [(15, 40)]
    plan = plan_of(
        [(10, 50)],
        [hit(40, unit_cfo=0.4)],
        images=images,
        method=method,
        options=tuple(sorted((budget, option))),
        default_ratio=default_ratio,
    )
    assert (plan.method, plan.fallback_reason, plan.selection) == (STAND_IN, "images", None)
    assert 0 < plan.num_recomputed < 15
    assert not rows_within(plan, images)


def test_at_ratio_1_all_rows_are_computed() -> None:
    plan = plan_of([(10, 50)], [hit(40)], images=[(15, 40)], ratio=1.0, prefix_len=10)
    assert plan.row_positions.tolist() == list(range(10, 50))


def test_keys_turn_by_positions_and_not_by_places() -> None:
    plan = plan_of([(40, 60)], [hit(20, start=10)], images=[(5, 30)], rope_starts=[20], prompt_len=100)
    assert plan.chunks[0].shift == 10


def test_a_chunk_of_which_an_image_is_stored_in_part_ends_in_front_of_it() -> None:
    plan = plan_of(
        [(10, 50), (50, 80)], [hit(40, covered_len=20), hit(30)], images=[(25, 45)], ratio=0.0, prefix_len=10
    )
    assert [(chunk.dst_start, chunk.num_reused) for chunk in plan.chunks] == [(10, 15), (50, 30)]
    assert plan.row_positions.tolist() == list(range(25, 50))


def test_a_page_that_ends_within_an_image_is_filled_up() -> None:
    ending = {"images": [(30, 50)], "ratio": 0.0, "page_size": 16, "prefix_len": 16}
    plan = plan_of([(16, 50)], [hit(34)], prompt_len=100, **ending)
    assert (plan.num_reused, plan.load_end, plan.row_positions.tolist()) == (34, 64, list(range(50, 64)))
    plan = plan_of([(16, 50)], [hit(34)], prompt_len=60, **ending)  # there is no such page
    assert (plan.num_reused, plan.load_end, plan.row_positions.tolist()) == (0, 16, [])


def test_rows_of_an_image_are_whole_wherever_it_stands() -> None:
    """As `forward/batch/image_rows` needs it: all rows of an image, those from the first on, or up to the last."""
    rng = random.Random(0)
    for _, page_size, ratio in itertools.product(range(60), (1, 16), (0.0, 0.3)):
        cuts = sorted(rng.sample(range(1, 200), 6))
        spans = [(cuts[0], cuts[1]), (cuts[1], cuts[3]), (cuts[4], cuts[5])]
        images = [
            (start + (end - start) // 4, end - rng.choice([0, (end - start) // 4]))
            for start, end in [*spans, (cuts[5], cuts[5] + 40)]
            if end - start > 4
        ]
        lookups = [
            rng.choice([NOT_STORED, hit(end - start), hit(end - start, covered_len=rng.randint(1, end - start))])
            for start, end in spans
        ]
        prefix_len = rng.randrange(cuts[3]) // page_size * page_size
        lookups = [None if end <= prefix_len else one for (_, end), one in zip(spans, lookups, strict=True)]
        plan = plan_of(
            spans, lookups, images=images, ratio=ratio, page_size=page_size, prompt_len=260, prefix_len=prefix_len
        )
        rows = [*plan.row_positions.tolist(), *range(plan.load_end, 260)]
        for first, last in images:
            own = [row for row in rows if first <= row < last]
            if own:
                assert own == list(range(own[0], own[-1] + 1)), (plan, images)
                assert own[0] == max(first, rows[0]), (plan, images)
                assert own[-1] == last - 1, (plan, images)


def test_a_prompt_without_images_says_nothing_of_them() -> None:
    plan = plan_of([(10, 50)], [hit(40)], prompt_len=100)
    assert plan.chunks[0].status is Status.HIT
    assert "image" not in str(plan.reply())
