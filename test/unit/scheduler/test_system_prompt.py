"""The system prompt: what two have in common, and what another one costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.index.system_prompt import PIECE, marks_of, num_pieces, piece_starts, share_elsewhere

TOKENS = st.lists(st.integers(0, 3), max_size=200)


@given(TOKENS)
def test_pieces_cover_it_and_the_first_token_is_one(tokens: list[int]) -> None:
    starts = piece_starts(len(tokens))
    assert starts == sorted(set(starts))
    assert starts[:2] == [0, 1][: len(tokens)]
    assert all(start < len(tokens) for start in starts)
    assert num_pieces(marks_of(tokens)) == len(starts)


@given(TOKENS, TOKENS, TOKENS)
def test_only_pieces_that_differ_cost(common: list[int], own: list[int], other: list[int]) -> None:
    old, new = common + own, common + other
    starts = [*piece_starts(len(old)), len(old)]
    shares = [2.0**-i for i in range(2, len(starts) + 1)]
    cost = sum(shares[i] for i in range(len(starts) - 1) if old[: starts[i + 1]] != new[: starts[i + 1]])
    if len(old) == len(new) or not old:
        assert share_elsewhere(shares, marks_of(old), marks_of(new)) == pytest.approx(cost)
    assert share_elsewhere(shares, marks_of(old), marks_of(old)) == 0.0


def test_a_date_at_the_end_costs_what_lay_on_the_end() -> None:
    old, new = [*range(2 * PIECE), 7], [*range(2 * PIECE), 8]
    assert share_elsewhere([0.5, 0.1, 0.1, 0.05], marks_of(old), marks_of(new)) == pytest.approx(0.05)
    assert share_elsewhere([0.5, 0.1, 0.1, 0.05], marks_of(old), marks_of([9, *old[1:]])) == pytest.approx(0.75)
    assert share_elsewhere([0.5, 0.1, 0.1, 0.05], marks_of(old), marks_of([])) == pytest.approx(0.75)
