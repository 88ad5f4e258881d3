"""Plans for a model with states: a chunk is reused whole behind its seam, or computed."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.methods import STATE_METHODS
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import PlanSettings, make_plan

SEAM_LEN = 8


def stored(number, length, covered_len=None, unit_cfo=None):
    home = NodeHome(array("q", range(length)), "chunk")
    variant = Variant(number, bytes([number]) * 16, length, 9, 0, (), 0, home)
    return Lookup(variant, length if covered_len is None else covered_len, None, unit_cfo)


def plan_of(spans, lookups, prompt_len, *, ratio=0.0, prefix_len=0, page_size=1, method=None):
    return make_plan(
        RequestOptions(spans=tuple(spans), method=method, ratio=ratio),
        PlanSettings(
            default_method="seams", default_ratio=0.5, page_size=page_size, seam_len=SEAM_LEN, has_states=True
        ),
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        max_prefix_len=prompt_len - 1,
        lookups=lookups,
        chunk_keys=[bytes([i]) * 16 for i in range(len(spans))],
    )


SPANS = [(10, 50), (50, 58), (60, 100)]


def test_what_is_cut_or_short_is_computed():
    lookups = [stored(0, 40), stored(1, 8), stored(2, 40, covered_len=39)]
    plan = plan_of(SPANS, lookups, 120)
    assert [(chunk.num_reused, chunk.reason) for chunk in plan.chunks] == [(40, None), (0, "too_short"), (0, "cut")]
    assert plan.row_positions.tolist() == [*range(10), *range(10, 18)]
    behind = plan_of(SPANS, lookups, 120, prefix_len=20)
    assert [chunk.reason for chunk in behind.chunks] == ["cut", "too_short", "cut"]
    assert behind.load_len == 0


def test_a_page_that_ends_behind_a_chunk_is_filled_with_rows():
    plan = plan_of(SPANS[:1], [stored(0, 40)], 120, page_size=16)
    assert (plan.load_end, plan.chunks[0].num_reused) == (64, 40)
    assert plan.row_positions.tolist() == [*range(18), *range(50, 64)]
    at_the_end = plan_of(SPANS[:1], [stored(0, 40)], 60, page_size=16)
    assert (at_the_end.load_len, at_the_end.chunks[0].reason) == (0, "prompt_end")


@pytest.mark.parametrize("method", STATE_METHODS)
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_methods(method, ratio):
    lookups = [stored(0, 40, unit_cfo=0.2), None, stored(2, 40, unit_cfo=0.9)]
    lookups[1] = Lookup(None, 0, "not_stored")
    plan = plan_of(SPANS, lookups, 120, ratio=ratio, method=method)
    counts = [len(plan.recomputed_in(chunk)) for chunk in plan.chunks]
    used = {"full": 1.0, "full-reuse": 0.0}.get(method, ratio)
    assert [counts[0], counts[2]] == {0.0: [8, 8], 0.4: [8, 8], 1.0: [40, 40]}[used]
    assert plan.method == ("seams" if used == 0.0 else method)


@given(
    lens=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    tail=st.integers(1, 30),
    prefix_pages=st.integers(0, 20),
    page_size=st.sampled_from((1, 4, 16)),
    ratio=st.floats(0, 1),
)
def test_between_two_runs_lies_one_chunk_behind_its_seam(lens, gaps, tail, prefix_pages, page_size, ratio):
    spans, end = [], 0
    for length, gap in zip(lens, gaps, strict=False):
        spans.append((end + gap, end + gap + length))
        end = spans[-1][1]
    prompt_len = end + tail
    prefix_len = min(prefix_pages * page_size, (prompt_len - 1) // page_size * page_size)
    lookups = [stored(i, end - start) if end > prefix_len else None for i, (start, end) in enumerate(spans)]
    plan = plan_of(spans, lookups, prompt_len, ratio=ratio, prefix_len=prefix_len, page_size=page_size)
    assert plan.load_end % page_size == 0
    computed = np.zeros(prompt_len, dtype=bool)
    computed[plan.row_positions] = True
    computed[plan.load_end :] = True
    left = set(np.flatnonzero(~computed[prefix_len:]) + prefix_len)
    for chunk in plan.chunks:
        if chunk.num_reused:
            behind_seam = set(range(chunk.start + SEAM_LEN, chunk.end))
            assert left >= behind_seam or not left & behind_seam
            left -= behind_seam
    assert not left
