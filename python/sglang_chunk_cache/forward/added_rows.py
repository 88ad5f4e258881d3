"""AddedRows: rows that a forward adds in front of one request's extend.

Verbs: `take_added_rows` (of all requests of a batch, once), `num_due_rows` (how many they are), `for_draft` (rows that
a draft adds), `everything` (every token of a load whose KV does not arrive).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from chunk_cache.methods import Stage
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selection_plan import Selection
from sglang_chunk_cache.kv.partial_load import LayerCopy
from sglang_chunk_cache.kv.pool import Load
from sglang_chunk_cache.request.chunk_request import ChunkRequest, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class AddedRows:
    """Rows that a forward adds in front of one request's extend.

    Attributes:
        positions: `[num_rows]` int64, ascending; placeholders of rows that a question will find have any reused ones.
        begin: where the loaded range, or what is left of it, begins; None if nothing was loaded.
        load: what was loaded for them; None if nothing was, or all of it is computed.
        state: of the request; None if `load` is.
    """

    positions: npt.NDArray[np.int64]
    begin: int | None = None
    load: Load | None = None
    state: ChunkRequest | None = None

    @property
    def layer_copies(self) -> tuple[LayerCopy, ...]:
        """KV of the loaded range that is still on its way."""
        return () if self.load is None else self.load.layer_copies

    def num_asking(self, num_layers: int) -> int:
        """Rows of the extra forward in which the question finds rows; if it ends early, their mean over all layers of
        the model."""
        if self.load is None:
            return 0
        last_layer = None if self.choice is None else self.choice.selection.last_asked_layer
        plan = self.load.plan
        return plan.num_asking if last_layer is None else len(plan.row_positions) * last_layer // num_layers

    @property
    def choice(self) -> Choice | None:
        """What is chosen or dropped among the rows during the forward; None: all rows stay."""
        if self.load is None or self.state is None or self.load.plan.selection is None:
            return None
        return Choice(self.state, self.load.plan, self.load.plan.selection)

    def for_draft(self) -> AddedRows:
        """All rows that the model begins with: a draft does not follow the choices of the model's forward."""
        return AddedRows(self.positions if self.load is None else self.load.plan.row_positions, self.begin)

    @property
    def is_spoilt(self) -> bool:
        """Whether a forward that was stopped between layers cannot be run again with the same rows.

        One that corrects can: its rows do not change a second time (`drift`), and questions that ask over all layers
        have waited for all of them before anything else was computed.
        """
        choice = self.choice
        return bool(self.layer_copies) or (
            choice is not None and choice.selection.stage is Stage.LAYER and not choice.selection.asks_first
        )

    def everything(self) -> AddedRows:
        """Every position of the loaded range, whose slots stay the request's own."""
        if self.load is None:
            return self
        plan = self.load.plan
        return AddedRows(np.arange(plan.load_start, plan.load_end), plan.load_start)


@dataclass(frozen=True)
class Choice:
    """What is chosen or dropped among the rows of one request, by its plan's selection."""

    state: ChunkRequest
    plan: RecomputePlan
    selection: Selection


NO_ROWS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
NOTHING_ADDED = AddedRows(NO_ROWS)


def num_due_rows(batch: ScheduleBatch) -> int:
    """How many rows the next forward of a batch adds, over all requests; they stay due."""
    loads = [state.admission.load for req in batch.reqs if (state := state_of(req)) is not None]
    return sum(len(_positions_of(load.plan)) for load in loads if load is not None)


def take_added_rows(batch: ScheduleBatch) -> tuple[AddedRows, ...] | None:
    """Takes the rows that are due, per request of the batch; None if no request was loaded since its last forward."""
    found = []
    for req in batch.reqs:
        state = state_of(req)
        load = None if state is None else state.admission.take_load()
        if load is None:
            found.append(NOTHING_ADDED)
        else:
            found.append(AddedRows(_positions_of(load.plan), load.plan.load_start, load, state))
    return tuple(found) if any(one.load is not None for one in found) else None


def _positions_of(plan: RecomputePlan) -> npt.NDArray[np.int64]:
    if plan.selection is None or not plan.selection.asks_first:
        return plan.row_positions
    reused = np.concatenate([np.arange(c.dst_start, c.dst_end) for c in plan.chunks if c.num_reused])
    return np.setdiff1d(np.arange(plan.load_start, plan.load_end), reused[plan.num_recomputed :], assume_unique=True)
