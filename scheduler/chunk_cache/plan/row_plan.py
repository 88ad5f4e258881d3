"""Rows of a load: which of its positions are computed, as far as that is known before the forward.

`choose_rows` asks the method; what only the forward can find is described by a `Selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from chunk_cache.methods import Method, Ranking, Rows, Stage, num_rows_at
from chunk_cache.methods.base import AllReused
from chunk_cache.methods.grouping import group_rows
from chunk_cache.methods.method_options import BLOCK_SIZE, GROUP_BUDGET, GROUP_SIZE, GROUP_THRESHOLD
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.image_spans import text_parts
from chunk_cache.plan.selection_plan import Selection, is_selecting, question_of
from chunk_cache.types import Span


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """See the fields of the same names in `RecomputePlan`."""

    row_positions: Rows
    num_recomputed: int
    num_late_rows: int = 0
    selection: Selection | None = None

    @property
    def num_rows(self) -> int:
        return len(self.row_positions) + self.num_late_rows


_NO_ROWS: Rows = np.empty(0, dtype=np.int64)
_NO_ROWS.setflags(write=False)


def choose_rows(
    chunks: Sequence[ChunkPlan],
    keys: Sequence[bytes],
    rankings: Sequence[Ranking | None],
    *,
    load_start: int,
    load_end: int,
    method: Method,
    ratio: float,
    opts: RequestOptions,
    prompt_len: int,
    budgets: Sequence[float] | None = None,
    seam_len: int = 0,
    images: Sequence[Span] = (),
) -> ChosenRows:
    """The rows of the load [load_start, load_end).

    Args:
        keys, rankings: one per chunk; rankings of whole chunks.
        budgets: per chunk the share to recompute, for a method that chooses before the forward; None = `ratio`.
        seam_len: as of `AllReused`.
        images: of the prompt; a method chooses from the text around them, as if each piece of it were a chunk.
    """
    if load_start == load_end:
        return ChosenRows(_NO_ROWS, 0)
    is_missing: npt.NDArray[np.bool_] = np.ones(load_end - load_start, dtype=np.bool_)
    for chunk in chunks:
        is_missing[chunk.dst_start - load_start : chunk.dst_end - load_start] = False
    question = question_of(opts.spans, prompt_len, opts.answer_tokens)
    if method.stage is not Stage.BEFORE:
        return _choose_in_forward(chunks, is_missing, load_start, method, ratio, opts, question)
    is_row = is_missing.copy()
    how = _Choice.of(method, opts)
    shares = [ratio] * len(chunks) if budgets is None else budgets
    hits = [
        (part, key, ranking, share)
        for chunk, key, ranking, share in zip(chunks, keys, rankings, shares, strict=True)
        if chunk.num_reused
        for part in (text_parts(chunk, images) if min(ratio, share) < 1.0 else (chunk,))
    ]
    if budgets is None and hits and method.shares_budget(opts.options):
        best_of_all = partial(how.best_of_all, hits, question[0], seam_len)
        chosen = how.within_windows(ratio, [chunk for chunk, *_ in hits], best_of_all)
    else:
        chosen = [how.within_windows(hit[3], [hit[0]], partial(how.best_of, *hit[:3]))[0] for hit in hits]
    num_recomputed = 0
    for (chunk, *_), rows in zip(hits, chosen, strict=True):
        is_row[rows + (chunk.dst_start - load_start)] = True
        num_recomputed += len(rows)
    # A budget below 1 may be rounded up to everything; then nothing may be dropped, as with ratio 1.
    is_partial = 0 < num_recomputed < sum(chunk.num_reused for chunk in chunks)
    is_dropping = is_partial and is_selecting(method, opts.options)
    selection = Selection(method.name, opts.options, ratio, (), question) if is_dropping else None
    return ChosenRows(_positions(is_row, load_start), num_recomputed, 0, selection)


def _choose_in_forward(
    chunks: Sequence[ChunkPlan],
    is_missing: npt.NDArray[np.bool_],
    load_start: int,
    method: Method,
    ratio: float,
    opts: RequestOptions,
    question: Span,
) -> ChosenRows:
    reused_lens = tuple(chunk.num_reused for chunk in chunks if chunk.num_reused)
    num_reused = sum(reused_lens)
    segment_lens = reused_lens if method.option(opts.options, "top_k") == "chunk" else (num_reused,)
    num_recomputed = sum(num_rows_at(ratio, length) for length in segment_lens)
    if num_recomputed in (0, num_reused):
        is_row = is_missing | (num_recomputed > 0)
        return ChosenRows(_positions(is_row, load_start), num_recomputed)
    selection = Selection(method.name, opts.options, ratio, segment_lens, question)
    if method.stage is Stage.QUESTION:
        return ChosenRows(_positions(is_missing, load_start), num_recomputed, num_recomputed, selection)
    return ChosenRows(_positions(np.ones_like(is_missing), load_start), num_recomputed, 0, selection)


def blocks_of(chunks: Sequence[ChunkPlan], size: int) -> Rows:
    """The block of each reused token of these chunks, `[num_reused]`; numbers go on from chunk to chunk.

    Args:
        chunks: at least one, each of which reuses something.
        size: tokens of a block; the first block of a chunk begins with the chunk, like a window.
    """
    parts: list[Rows] = []
    for chunk in chunks:
        own = (np.arange(chunk.dst_start, chunk.dst_end) - chunk.start) // size
        first = parts[-1][-1] + 1 if parts else 0
        parts.append(own - own[0] + first)
    blocks: Rows = np.concatenate(parts)
    return blocks


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a method that chooses before the forward does so, for all chunks of one request."""

    method: Method
    seed: int
    group_size: int
    group_threshold: int
    block_size: int
    fills_windows: bool

    @classmethod
    def of(cls, method: Method, opts: RequestOptions) -> _Choice:
        fills_windows = GROUP_BUDGET in method.own_options and method.option(opts.options, GROUP_BUDGET.name) == "kept"
        sizes = [method.option(opts.options, one.name) for one in (GROUP_SIZE, GROUP_THRESHOLD, BLOCK_SIZE)]
        seed = opts.option("seed", 0)  # only some methods have it
        assert isinstance(seed, int)
        size, threshold, block_size = (one for one in sizes if isinstance(one, int))
        return cls(method, seed, size, threshold, block_size, fills_windows and size > 0)

    def best_of(self, chunk: ChunkPlan, key: bytes, ranking: Ranking | None, budget: float) -> list[Rows]:
        """Chosen offsets in the reused part of one chunk, by a budget of its own; a list of one array."""
        ranking = None if ranking is None else _reused_part(ranking, chunk)
        rows = self.method.rows_for_chunk(
            chunk.src_offset,
            chunk.num_reused,
            budget,
            seed=self.seed,
            chunk_key=key,
            ranking=ranking,
            blocks=self._blocks([chunk]),
        )
        return [rows]

    def best_of_all(
        self,
        hits: Sequence[tuple[ChunkPlan, bytes, Ranking | None, float]],
        question_start: int,
        seam_len: int,
        ratio: float,
    ) -> list[Rows]:
        """Chosen offsets in the reused part of each chunk, by one budget for all of them."""
        chunks = [chunk for chunk, *_ in hits]
        parts = [
            np.full(chunk.num_reused, np.nan, dtype=np.float32) if ranking is None else _reused_part(ranking, chunk)
            for chunk, _, ranking, _ in hits
        ]
        spans = [(chunk.dst_start, chunk.dst_end) for chunk in chunks]
        reused = AllReused(
            spans,
            question_start,
            self.seed,
            np.concatenate(parts),
            self._blocks(chunks),
            [chunk.cfo for chunk in chunks],
            seam_len,
        )
        rows = self.method.rows_of_all(ratio, reused)
        starts = np.cumsum([0, *reused.lens])
        cuts = np.searchsorted(rows, starts)
        return [rows[cuts[i] : cuts[i + 1]] - starts[i] for i in range(len(hits))]

    def _blocks(self, chunks: Sequence[ChunkPlan]) -> Rows | None:
        return blocks_of(chunks, self.block_size) if self.block_size else None

    def within_windows(
        self, ratio: float, chunks: Sequence[ChunkPlan], choose: Callable[[float], list[Rows]]
    ) -> list[Rows]:
        """For each chunk, the chosen rows that lie in windows in which enough rows were chosen.

        Args:
            choose: chooses by a ratio; by a larger ratio it chooses a superset.
        """
        if not self.fills_windows:
            return self._grouped(chunks, choose(ratio))
        num_tokens = sum(chunk.num_reused for chunk in chunks)
        budget = num_rows_at(ratio, num_tokens)
        least, most = budget, num_tokens
        while least < most:  # finds the largest choice of which windows keep at most the budget
            middle = (least + most + 1) // 2
            if sum(map(len, self._grouped(chunks, choose(middle / num_tokens)))) > budget:
                most = middle - 1
            else:
                least = middle
        return self._grouped(chunks, choose(least / num_tokens))

    def _grouped(self, chunks: Sequence[ChunkPlan], chosen: Sequence[Rows]) -> list[Rows]:
        if not self.group_size:
            return list(chosen)
        return [
            rows
            if len(rows) == chunk.num_reused
            else group_rows(
                rows,
                offset_len=chunk.src_offset,
                chunk_len=chunk.end - chunk.start,
                size=self.group_size,
                threshold=self.group_threshold,
            )
            for chunk, rows in zip(chunks, chosen, strict=True)
        ]


def _reused_part(ranking: Ranking, chunk: ChunkPlan) -> Ranking:
    return ranking[chunk.src_offset : chunk.src_offset + chunk.num_reused]


def _positions(is_row: npt.NDArray[np.bool_], load_start: int) -> Rows:
    positions = (np.flatnonzero(is_row) + load_start).astype(np.int64, copy=False)
    positions.setflags(write=False)
    return positions
