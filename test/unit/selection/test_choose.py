"""Choices on the device against loops over rows, ties by position; windows against those of the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.methods.grouping import group_rows
from sglang_chunk_cache.forward.row_choice import block_means, chunk_of, group_mask, keep_best, keep_where
from sglang_chunk_cache.forward.selection.progress import Pending, Piece
from sglang_chunk_cache.forward.selection.tables import Tables

# Few values, so that ties are common; +inf marks rows that must stay.
SCORES = st.sampled_from((0.0, -0.0, 0.5, 1.0, 7.0, math.inf)) | st.floats(-10, 10, width=32)


@st.composite
def scores_in_pieces(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    scores: list[float] = []
    pieces = []
    for piece in draw(st.lists(st.lists(SCORES, max_size=12), min_size=1, max_size=5)):
        scores += piece
        pieces.append((len(piece), draw(st.integers(0, len(piece)))))
    return scores, pieces


@given(scores_in_pieces())
def test_keep_best_equals_a_loop_over_rows(case: tuple[list[float], list[tuple[int, int]]]) -> None:
    scores, pieces = case
    kept = keep_best(torch.tensor(scores), pieces)
    expected, begin = [], 0
    for num_rows, num_kept in pieces:
        rows = sorted(range(begin, begin + num_rows), key=lambda row: (-scores[row], row))
        expected += sorted(rows[:num_kept])
        begin += num_rows
    assert kept.dtype == torch.int64
    assert kept.tolist() == expected


def test_ties_go_to_the_earlier_row() -> None:
    assert keep_best(torch.zeros(1000), [(1000, 7)]).tolist() == list(range(7))
    assert keep_best(torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]), [(5, 2)]).tolist() == [1, 2]


def test_rows_that_must_stay_are_kept_before_any_score() -> None:
    scores = torch.tensor([3e38, math.inf, 0.0, math.inf, 3e38])
    assert keep_best(scores, [(5, 2)]).tolist() == [1, 3]
    assert keep_best(scores, [(5, 3)]).tolist() == [0, 1, 3]


def test_pieces_cover_all_scores() -> None:
    for pieces in ([(3, 1)], [(3, 1), (2, 0)]):
        with pytest.raises(AssertionError, match="pieces of"):
            keep_best(torch.zeros(4), pieces)


@given(st.lists(st.booleans(), max_size=60))
def test_keep_where_lists_the_true_entries(mask: list[bool]) -> None:
    kept = keep_where(torch.tensor(mask, dtype=torch.bool), sum(mask))
    assert kept.dtype == torch.int64
    assert kept.tolist() == np.flatnonzero(mask).tolist()


@st.composite
def chunk_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    end, ranges = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=5)):
        ranges.append((end + gap, end + gap + length))
        end = ranges[-1][1]
    return ranges


@given(chunk_ranges(), st.data())
def test_chunk_of_equals_a_loop_over_ranges(ranges: list[tuple[int, int]], data: st.DataObject) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, ranges[-1][1] + 5))))
    starts, ends = (torch.tensor(bounds) for bounds in zip(*ranges, strict=True))
    found = chunk_of(torch.tensor(positions, dtype=torch.int64), starts, ends)
    expected = [next((i for i, (a, b) in enumerate(ranges) if a <= p < b), -1) for p in positions]
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@dataclass(frozen=True)
class Grouping:
    ranges: list[tuple[int, int]]
    reused: list[tuple[int, int]]
    """The part of each range whose rows may leave."""
    rows: list[int]
    size: int
    threshold: int

    def chunk(self, position: int) -> int:
        return next((i for i, (a, b) in enumerate(self.reused) if a <= position < b), -1)

    def tables(self) -> Tables:
        spans = zip(self.ranges, self.reused, strict=True)
        chunks = [
            SimpleNamespace(start=a, end=b, dst_start=first, dst_end=last, num_reused=last - first)
            for (a, b), (first, last) in spans
        ]
        selection = SimpleNamespace(group_size=self.size, block_size=self.size)
        plan: Any = SimpleNamespace(chunks=chunks, selection=selection)
        return Tables(*map(torch.from_numpy, Tables.of(plan, self.ranges[-1][1] + 6)))

    def mask(self) -> list[bool]:
        tables = self.tables()
        rows = torch.tensor(self.rows, dtype=torch.int64)
        assert tables.chunk_at[rows].tolist() == [self.chunk(row) for row in self.rows]
        mask = group_mask(
            tables.window_at[rows],
            tables.chunk_at[rows] < 0,
            tables.window_lens,
            size=self.size,
            threshold=self.threshold,
        )
        assert (mask.dtype, mask.shape) == (torch.bool, (len(self.rows),))
        return mask.tolist()


@st.composite
def groupings(draw: st.DrawFn) -> Grouping:
    ranges = draw(chunk_ranges())
    reused = []
    for start, end in ranges:
        first = draw(st.just(start) | st.integers(start, end - 1))
        reused.append((first, draw(st.just(end) | st.integers(first + 1, end))))
    size = draw(st.integers(1, 12))
    return Grouping(
        ranges=ranges,
        reused=reused,
        rows=sorted(draw(st.sets(st.integers(0, ranges[-1][1] + 5)))),
        size=size,
        threshold=draw(st.integers(0, size - 1)),
    )


@given(groupings())
def test_group_mask_equals_a_loop_over_windows(case: Grouping) -> None:
    stays = {row: case.chunk(row) < 0 for row in case.rows}
    for i, (start, end) in enumerate(case.ranges):
        for first in range(start, end, case.size):
            window = range(first, min(first + case.size, end))
            rows = [row for row in case.rows if row in window and case.chunk(row) == i]
            is_kept = Fraction(len(rows), len(window)) > Fraction(case.threshold, case.size)
            stays.update(dict.fromkeys(rows, is_kept))
    assert case.mask() == [stays[row] for row in case.rows]


@given(groupings())
def test_group_mask_equals_the_windows_of_the_host(case: Grouping) -> None:
    mask = dict(zip(case.rows, case.mask(), strict=True))
    for i, ((start, end), (first, _)) in enumerate(zip(case.ranges, case.reused, strict=True)):
        rows = [row for row in case.rows if case.chunk(row) == i]
        kept = group_rows(
            np.array(rows, dtype=np.int64) - first,
            offset_len=first - start,
            chunk_len=end - start,
            size=case.size,
            threshold=case.threshold,
        )
        assert (kept + first).tolist() == [row for row in rows if mask[row]]
    assert all(mask[row] for row in case.rows if case.chunk(row) < 0)


@given(groupings(), st.data())
def test_block_means_equal_a_loop_over_blocks(case: Grouping, data: st.DataObject) -> None:
    drawn = st.floats(-10, 10, width=32)
    scores = data.draw(st.lists(drawn, min_size=len(case.rows), max_size=len(case.rows)))
    tables = case.tables()
    rows = torch.tensor(case.rows, dtype=torch.int64)
    means = block_means(torch.tensor(scores, dtype=torch.float32), rows, tables.block_at, tables.blocks).tolist()
    blocks: dict[tuple[int, int], list[int]] = {}
    for at, row in enumerate(case.rows):
        if (chunk := case.chunk(row)) >= 0:
            blocks.setdefault((chunk, (row - case.ranges[chunk][0]) // case.size), []).append(at)
    for members in blocks.values():
        own = [means[at] for at in members]
        assert len(set(own)) == 1, "rows of a block have one score"
        assert own[0] == pytest.approx(sum(scores[at] for at in members) / len(members), abs=1e-5)


def test_a_piece_may_have_no_row_left() -> None:
    pieces = [Piece(3, 2, 0), Piece(0, 0, 1), Piece(2, 2, 2), Piece(0, 0, 3)]
    mask = torch.tensor([True, False, True, True, False])
    assert Pending(mask, pieces, None).read() == (False, [2, 0, 1, 0])
    assert Pending(mask[:0], [Piece(0)], torch.tensor(True)).read() == (True, [0])
