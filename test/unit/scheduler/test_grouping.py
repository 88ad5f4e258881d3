"""Grouping against its definition, window by window."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.methods.grouping import group_rows


@dataclass(frozen=True)
class Case:
    rows: list[int]
    offset_len: int
    chunk_len: int
    size: int
    threshold: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunk_len = draw(st.integers(1, 60))
    offset_len = draw(st.just(0) | st.integers(0, chunk_len - 1))
    num_reused = draw(st.integers(1, chunk_len - offset_len))
    size = draw(st.integers(1, 20))
    return Case(
        rows=sorted(draw(st.sets(st.integers(0, num_reused - 1)))),
        offset_len=offset_len,
        chunk_len=chunk_len,
        size=size,
        threshold=draw(st.integers(0, size - 1)),
    )


def group(case: Case) -> list[int]:
    rows = np.array(case.rows, dtype=np.int64)
    kept = group_rows(
        rows, offset_len=case.offset_len, chunk_len=case.chunk_len, size=case.size, threshold=case.threshold
    )
    assert kept.dtype == np.int64
    assert rows.tolist() == case.rows
    return kept.tolist()


def group_by_definition(case: Case) -> list[int]:
    """Windows of the whole chunk; one keeps its selected tokens where their share exceeds threshold / size."""
    kept = []
    for start in range(0, case.chunk_len, case.size):
        window = range(start, min(start + case.size, case.chunk_len))
        selected = [row for row in case.rows if row + case.offset_len in window]
        if Fraction(len(selected), len(window)) > Fraction(case.threshold, case.size):
            kept += selected
    return kept


@given(cases())
def test_equals_the_definition(case: Case) -> None:
    assert group(case) == group_by_definition(case)


@given(cases())
def test_grouping_again_changes_nothing(case: Case) -> None:
    kept = group(case)
    assert set(kept) <= set(case.rows)
    assert group(Case(kept, case.offset_len, case.chunk_len, case.size, case.threshold)) == kept


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([0, 1, 2, 3, 4], []),  # 5 of 8 are not more than 5
        ([0, 1, 2, 3, 4, 7], [0, 1, 2, 3, 4, 7]),
        ([3, 4, 5, 6, 7, 8], []),  # six in a row, but in two windows
        ([16, 17, 18], [16, 17, 18]),  # the last window has 4 tokens: 3 of 4 are a larger share than 5 of 8
        ([16, 17], []),
        ([], []),
    ],
)
def test_windows_of_eight_by_hand(rows: list[int], kept: list[int]) -> None:
    assert group(Case(rows, 0, 20, 8, 5)) == kept


def test_windows_are_counted_from_the_first_token_of_the_chunk() -> None:
    assert group(Case([0, 1, 2], 5, 20, 8, 2)) == [0, 1, 2]  # tokens 5, 6, 7
    assert group(Case([0, 1, 2], 6, 20, 8, 2)) == []  # tokens 6, 7, 8


@given(cases())
def test_whole_windows_stay(case: Case) -> None:
    everything = list(range(case.chunk_len))
    assert group(Case(everything, 0, case.chunk_len, case.size, case.threshold)) == everything
