"""RequestProgress: one request on its way through the layers of one forward.

Verbs, in the order of a layer: `leave` (drops rows by what was decided a layer ago) and `select` (keeps the best by
score), which both return the rows that are left, and `observe` (adds what this layer's attention says of chunks).
`left_rows` is what a `DriftCorrection` sees of it in between. A request whose question is asked first goes through
`choose_rows` behind the `QuestionPass`, which sets `question_scores`.

Promises: rows of missing chunks and of the question never leave; how many rows are left is always known to the host.
What only the device finds (windows that grouping discards, chunks that lose the focus) is copied to the host behind
the layer that found it and takes effect at the next one, so the device never waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from chunk_cache.methods import METHODS, Options, Stage
from chunk_cache.methods.scored import QuestionMethod
from chunk_cache.plan.recompute_plan import RecomputePlan
from sgl_kernel_ext.transfer import Download
from sglang_chunk_cache.forward.row_choice import block_means, group_mask, keep_best, keep_where
from sglang_chunk_cache.forward.selection.drift import LeftRows, Reused
from sglang_chunk_cache.forward.selection.focus import FocusTracker
from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer, scorer_of
from sglang_chunk_cache.forward.selection.tables import Tables
from sglang_chunk_cache.kv.ranks import sum_over_ranks
from sglang_chunk_cache.request.selection_report import SelectionReport


@dataclass(frozen=True)
class Piece:
    """Consecutive rows, of which the `num_reused` reused ones may leave; pieces of one `segment` share its budget."""

    num_rows: int
    num_reused: int = 0
    segment: int | None = None

    @property
    def num_fixed(self) -> int:
        return self.num_rows - self.num_reused

    def with_reused(self, num_reused: int) -> Piece:
        """The same piece once only so many of its reused rows are left."""
        return replace(self, num_rows=self.num_fixed + num_reused, num_reused=num_reused)


class Pending:
    """A mask of the rows that stay, on its way to the host.

    Args:
        mask: bool `[num_rows]`.
        pieces: of the rows.
        settled: whether the focus has settled, bool scalar; None where it was not evaluated.
    """

    def __init__(self, mask: torch.Tensor, pieces: list[Piece], settled: torch.Tensor | None) -> None:
        self.mask = mask
        self._has_settled = settled is not None
        self._download = Download(mask if settled is None else torch.cat([mask, settled[None]]))
        self._bounds = np.cumsum([0, *(piece.num_rows for piece in pieces)])

    def read(self) -> tuple[bool, list[int]]:
        """Whether the focus has settled, and how many rows of each piece stay.

        This is the only wait of a fused batch, and only methods with grouping or focus have it: what one layer found
        says how many rows the next has. By then the work behind that layer is queued, so the device stays busy.
        """
        values = self._download.read().numpy()
        num_before = np.searchsorted(np.flatnonzero(values[: len(self.mask)]), self._bounds)
        return self._has_settled and bool(values[-1]), np.diff(num_before).tolist()


class RequestProgress:
    """See the head of this file.

    Args:
        positions: `[num_rows]` int64, the rows that it begins with, ascending, on the device; if the question is asked
            first, those that are computed in any case.
        plan: of a request with something to choose or drop; None for one whose rows all stay.
        tables: of the plan, on the device; None without a plan.
        num_question, num_answer: how many of the last rows are the question's and, behind them, the answer's.
        num_layers: of the model.
        explain: keep a `SelectionReport`.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        plan: RecomputePlan | None = None,
        tables: Tables | None = None,
        *,
        num_question: int = 0,
        num_answer: int = 0,
        num_layers: int = 0,
        tp_size: int = 1,
        explain: bool = False,
    ) -> None:
        self.positions = positions
        self.num_question, self.num_answer = num_question, num_answer
        self.question_scores: torch.Tensor | None = None  # [kv_len]
        self.report: SelectionReport | None = None
        self._pieces = [Piece(len(positions))]
        self._tp_size = tp_size
        self._num_layers = num_layers
        self._plan = plan
        self._focus: FocusTracker | None = None
        self._members: torch.Tensor | None = None  # [num_chunks, kv_len] fp32, 1 where a key is of the chunk
        self._pending: Pending | None = None
        # What this layer decides: rows that stay, and whether the focus has settled.
        self._stays: torch.Tensor | None = None
        self._settled: torch.Tensor | None = None
        self._is_selected = False
        if plan is None:
            return
        assert plan.selection is not None
        assert tables is not None
        selection = self._selection = plan.selection
        self._tables = tables
        self._hits = [chunk for chunk in plan.chunks if chunk.num_reused]
        if explain:
            self.report = SelectionReport(plan, num_layers)
        if self._selects:
            self._scorer = scorer_of(selection.method)
        if selection.stage is not Stage.BEFORE:
            self._counts = selection.layer_counts(num_layers)
        if selection.focus_window:
            self._focus = FocusTracker(len(plan.chunks), selection.focus_window, positions.device)
        if not selection.asks_first:
            self._begin(positions)

    @property
    def _selects(self) -> bool:
        """Whether rows leave by score in the forward that computes the answer."""
        return self._plan is not None and self._selection.stage is Stage.LAYER and not self._selection.asks_first

    @property
    def question_scoring(self) -> tuple[str, frozenset[int]]:
        """The method by which its question is scored, and the layers at which it is."""
        method, last_layer = METHODS[self._selection.method], self._selection.last_asked_layer
        if last_layer is not None:
            return method.name, frozenset([last_layer])
        assert isinstance(method, QuestionMethod)
        return method.name, frozenset(method.scored_layers(self._selection.options, self._num_layers))

    @property
    def options(self) -> Options:
        """Those options of its method that are given."""
        return () if self._plan is None else self._selection.options

    @property
    def num_rows(self) -> int:
        """Rows that are left."""
        return len(self.positions)

    @property
    def rows_leave(self) -> bool:
        """Whether rows may leave between layers."""
        if self._plan is None:
            return False
        return self._selects or bool(self._selection.group_size) or bool(self._selection.focus_window)

    def count_seconds(self, seconds: float) -> None:
        """Adds host time to the report."""
        if self.report is not None:
            self.report.seconds += seconds

    # The question first.

    def choose_rows(self) -> torch.Tensor:
        """Chooses rows by the scores of the question; returns the positions of all rows, `[num_rows]`."""
        assert self._plan is not None
        assert self.question_scores is not None, "no question was asked"
        reused = self._tables.reused
        scores = self.question_scores[reused]
        found = keep_best(
            self._by_block(scores, reused), list(zip(self._selection.segment_lens, self._counts[-1], strict=True))
        )
        if self.report is not None:
            is_late = torch.zeros_like(reused, dtype=torch.bool).index_fill_(0, found, True)
            self.report.record_scores(scores, is_late, self._selection.last_asked_layer)
        self._begin(torch.cat([self.positions, reused[found]]).sort().values)
        self._after_selection()
        self.finish_layer()
        return self.positions

    # The layers.

    def leave(self, layer_id: int) -> torch.Tensor | None:
        """Drops rows by what was decided a layer ago; returns indices of the rows that are left, None if all are."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        settled, counts = pending.read()
        if settled:
            self._focus = None
            if self.report is not None:
                self.report.record_settled(layer_id - 1)
        if sum(counts) == self.num_rows:
            return None
        index = keep_where(pending.mask, sum(counts))
        pairs = zip(self._pieces, counts, strict=True)
        self._keep(layer_id, index, [piece.with_reused(count - piece.num_fixed) for piece, count in pairs])
        return index

    def select(self, layer_id: int, rows: RowsAtLayer) -> torch.Tensor | None:
        """Drops rows by their scores at this layer; returns indices of the rows that are left."""
        scores = sum_over_ranks(self._scorer(rows), self._tp_size)
        stays = self._chunk < 0
        left = self._left_at(layer_id)
        sizes = [(before.num_rows, after.num_rows) for before, after in zip(self._pieces, left, strict=True)]
        index = keep_best(self._by_block(scores, self.positions).masked_fill(stays, float("inf")), sizes)
        if self.report is not None and not self._is_selected:
            is_left = torch.zeros_like(stays).index_fill_(0, index, True)
            self.report.record_scores(scores, is_left, layer_id, ignore=stays)
        self._keep(layer_id, index, left)
        if not self._is_selected:
            self._after_selection()
        return index

    def selects_at(self, layer_id: int) -> bool:
        """Whether rows leave by score at this layer."""
        return self._selects and self._left_at(layer_id) != self._pieces

    @property
    def observes(self) -> bool:
        """Whether `observe` needs the rows of the layer."""
        return self._focus is not None

    def observe(self, layer_id: int, rows: RowsAtLayer) -> None:
        """Adds what the question attends to at this layer."""
        assert self._focus is not None
        received = sum_over_ranks(rows.question_mass(), self._tp_size)
        if self._members is None:
            at, (starts, ends) = torch.arange(len(received), device=received.device), self._tables.bounds[..., None]
            self._members = ((at >= starts) & (at < ends)).float()
        # A matrix product, so that all ranks agree: a GPU does not promise the order of a running sum.
        found = self._focus.update(self._members @ received)
        if found is None:
            return
        settled, is_focused = found
        stays = (self._chunk < 0) | is_focused[self._tables.ordinals[self._chunk.clamp(min=0)]] | settled.logical_not()
        self._settled = settled
        self._stays = stays if self._stays is None else self._stays & stays
        if self.report is not None:
            self.report.record_focus(is_focused)

    @property
    def corrects(self) -> bool:
        """Whether reused K and V are corrected at every layer (`drift`)."""
        return self._plan is not None and bool(self._selection.drift)

    def corrected(self, request: int, kv_slots: torch.Tensor) -> Reused:
        """The reused tokens that are corrected; `request`: its place in the batch; `kv_slots`: of each position."""
        reused, strength = self._tables.reused, self._selection.drift
        return Reused(request, reused, self._tables.chunk_at[reused], len(self._hits), kv_slots, strength)

    def left_rows(self, begin: int) -> LeftRows:
        """The rows that are left; `begin`: place of the first of them in the batch."""
        return LeftRows(begin, self.positions, self._chunk, sum(piece.num_reused for piece in self._pieces))

    def finish_layer(self) -> None:
        """Sends what the layer decided to the host."""
        if self._stays is not None:
            self._pending = Pending(self._stays, self._pieces, self._settled)
            self._stays = self._settled = None

    # Bookkeeping.

    def _by_block(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The values by which rows at these positions are chosen: their scores, or those of their blocks."""
        if not self._selection.block_size:
            return scores
        return block_means(scores, positions, self._tables.block_at, self._tables.blocks)

    def _begin(self, positions: torch.Tensor) -> None:
        """Begins with these rows."""
        self.positions = positions
        self._chunk = self._tables.chunk_at[positions]
        self._pieces = self._initial_pieces(len(positions))
        self._is_selected = self._selection.stage is Stage.BEFORE
        if self.report is not None and self._is_selected:
            self.report.record_selected(positions)
        elif self.report is not None and self._selects:
            self.report.record_left(0, positions)

    def _initial_pieces(self, num_rows: int) -> list[Piece]:
        assert self._plan is not None
        if not self._selects:
            return [Piece(num_rows, self._plan.num_recomputed)]
        if len(self._selection.segment_lens) == 1:
            return [Piece(num_rows, self._plan.num_reused, segment=0)]
        pieces, at = [], self._plan.load_start
        for segment, chunk in enumerate(self._hits):
            pieces += [Piece(chunk.dst_start - at), Piece(chunk.num_reused, chunk.num_reused, segment)]
            at = chunk.dst_end
        pieces.append(Piece(num_rows - sum(piece.num_rows for piece in pieces)))
        return [piece for piece in pieces if piece.num_rows]

    def _left_at(self, layer_id: int) -> list[Piece]:
        counts = self._counts[layer_id]
        return [p if p.segment is None else p.with_reused(min(p.num_reused, counts[p.segment])) for p in self._pieces]

    def _after_selection(self) -> None:
        """Notes the first choice, and has grouping discard windows with too few chosen rows."""
        self._is_selected = True
        if self.report is not None:
            self.report.record_selected(self.positions)
        if self._selection.group_size:
            self._stays = group_mask(
                self._tables.window_at[self.positions],
                self._chunk < 0,
                self._tables.window_lens,
                size=self._selection.group_size,
                threshold=self._selection.group_threshold,
            )

    def _keep(self, layer_id: int, index: torch.Tensor, pieces: list[Piece]) -> None:
        self.positions, self._chunk, self._pieces = self.positions[index], self._chunk[index], pieces
        if self.report is not None:
            self.report.record_left(layer_id, self.positions)
