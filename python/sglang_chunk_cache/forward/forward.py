"""Forward: what one forward of a batch computes, if it is not simply SGLang's.

Verbs: `announce` (attaches a `Forward` to its batch), `announced` (takes it from the batch), `TargetForwards.note` and
`take` (rows that the model's forward of a batch adds, for the model that drafts behind it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chunk_cache.gate.verification_queue import Candidate
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.attending import Attention, Observer
from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.kv.partial_load import LayerLoads

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


_FORWARD = "chunk_cache_forward"


@dataclass(frozen=True)
class Part:
    """Some of the rows of a batch, computed at once.

    A batch has several where its rows are more than a step may have, or where questions find rows.

    Attributes:
        batch: as the model sees it.
        attention: in the place of SGLang's backend; None = that one.
        observers: look on.
        states: what layers with states do; None = as in SGLang's forward of `batch`.
        is_question: its output is not used: it runs for what `observers` see, and the K and V that it writes.
        last_layer: the layer at which it ends without an output, once K and V are written; None = a whole forward.
        choose: writes rows that the part in front has found into `batch`, and returns what attends; None = all rows
            were known.
    """

    batch: ForwardBatch
    attention: Attention | None = None
    observers: tuple[Observer, ...] = ()
    states: StateForward | None = None
    is_question: bool = False
    last_layer: int | None = None
    choose: Callable[[], Attention] | None = None

    def ready(self) -> Part:
        """The same part, once those in front of it are computed."""
        return self if self.choose is None else replace(self, attention=self.choose(), choose=None)


@dataclass(frozen=True)
class Forward:
    """What one forward of a batch computes.

    Attributes:
        parts: in the order in which they are computed. SGLang is given the batch of the last; the logits of the others
            mean nothing.
        added: rows that stand in front of each request's extend; None where no request has any.
        timing: measures the forward; None = it is not measured.
        loads: KV that arrives during the forward; None = all is there.
        instead: given the reason why KV does not arrive, makes the forward that is computed in its place.
        tail_lens: rows of each request's ordinary extend; None = the hidden states of all rows are wanted.
        first_rows: requests to verify whose first token follows from this forward, with their places in the batch.
    """

    parts: tuple[Part, ...]
    added: tuple[AddedRows, ...] | None = None
    timing: contextlib.AbstractContextManager[None] | None = None
    loads: LayerLoads | None = None
    instead: Callable[[str], Forward] | None = None
    tail_lens: tuple[int, ...] | None = None
    first_rows: tuple[tuple[int, Candidate], ...] = ()

    @property
    def batch(self) -> ForwardBatch:
        """The one that SGLang is given."""
        return self.parts[-1].batch

    @property
    def is_stock(self) -> bool:
        """Whether the forward is simply SGLang's."""
        part = self.parts[-1]
        is_plain = part.attention is None and not part.observers and part.states is None
        return is_plain and self.timing is None and not self.first_rows


def announce(forward: Forward) -> ForwardBatch:
    """Attaches a forward to the batch that SGLang is given, and returns that batch."""
    if not forward.is_stock:
        setattr(forward.batch, _FORWARD, forward)
    return forward.batch


def announced(batch: ForwardBatch) -> Forward | None:
    """Takes the forward that was attached to a batch; None = its forward is SGLang's alone.

    A forward holds its batch: if the batch still held the forward, both would live until Python collects cycles.
    """
    return vars(batch).pop(_FORWARD, None)


class TargetForwards:
    """The newest forward of the model, for the model that drafts: it computes the same rows of the same batch."""

    def __init__(self) -> None:
        self._newest: tuple[ScheduleBatch, tuple[AddedRows, ...] | None] | None = None

    def note(self, batch: ScheduleBatch, forward: Forward) -> None:
        """Notes the forward of a batch, which the model is about to compute."""
        self._newest = batch, forward.added

    def take(self, batch: ScheduleBatch) -> tuple[AddedRows, ...] | None:
        """Rows that the model's forward of a batch adds; None where it adds none.

        Raises:
            RuntimeError: the draft's forward of the batch comes before the model's, or a second time.
        """
        newest, self._newest = self._newest, None
        if newest is None or newest[0] is not batch:
            raise RuntimeError("a draft asks for the rows of a batch that the model has not just computed")
        return newest[1]
