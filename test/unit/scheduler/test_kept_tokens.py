"""Which tokens may be dropped, and how many are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.options.kept_tokens import WINDOW_LEN, KeptTokens, check_room, droppable, plan_kept

SPANS = ((10, 200), (220, 400))


@pytest.mark.parametrize(
    ("keep_tokens", "expected"),
    [
        (None, None),
        (0, None),
        (500, None),  # the prompt
        (499, KeptTokens(10, 400, 389)),
        (200, KeptTokens(10, 400, 90)),
        (111, KeptTokens(10, 400, 1)),
        (110, None),  # what is kept in any case
    ],
)
def test_a_prompt_needs_as_many_slots_as_asked_for(keep_tokens: int | None, expected: KeptTokens | None) -> None:
    found = plan_kept(SPANS, keep_tokens, 500)
    assert found == expected
    assert found is None or 500 - found.num_dropped == keep_tokens


def test_the_last_tokens_are_kept_where_a_chunk_ends_the_prompt() -> None:
    assert droppable(SPANS, 400) == (10, 400 - WINDOW_LEN)
    assert droppable(SPANS, 432) == (10, 400)
    assert droppable(((5, 20),), 20) == (5, 5)
    assert droppable((), 20) == (20, 20)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 80)), max_size=5),
    st.integers(0, 60),
    st.integers(0, 500),
)
def test_a_prompt_is_whole_or_has_the_size_asked_for(
    pieces: list[tuple[int, int]], question_len: int, keep_tokens: int
) -> None:
    spans: Any = []
    for gap, length in pieces:
        start = (spans[-1][1] if spans else 0) + gap
        spans.append((start, start + length))
    prompt_len = (spans[-1][1] if spans else 0) + question_len
    kept = plan_kept(tuple(spans), keep_tokens, prompt_len)
    try:
        check_room(tuple(spans), keep_tokens, prompt_len, "keep_tokens")
        is_refused = False
    except ChunkCacheRequestError:
        is_refused = True
    assert (kept is not None) == (bool(spans) and 0 < keep_tokens < prompt_len and not is_refused)
    if kept is not None:
        assert prompt_len - kept.num_dropped == keep_tokens
        assert spans[0][0] == kept.begin < kept.end <= min(spans[-1][1], prompt_len - WINDOW_LEN)
