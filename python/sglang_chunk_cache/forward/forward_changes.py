"""ForwardChanges: what one forward does differently from stock SGLang.

Verbs: `announce` (of the forward of a batch), `announced` (what was).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chunk_cache.gate.verification_queue import Candidate
from sglang_chunk_cache.forward.attending import Attention, Observer
from sglang_chunk_cache.kv.partial_load import LayerLoads

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_EXTRAS = "chunk_cache_extras"


@dataclass(frozen=True)
class Part:
    """A forward of some of the rows of a batch; a batch with more rows than a step may have is computed in parts.

    Attributes:
        batch: as the model sees it.
        attention: in the place of SGLang's backend; None = that one.
        observers: look on.
    """

    batch: ForwardBatch
    attention: Attention | None
    observers: tuple[Observer, ...] = ()


@dataclass(frozen=True)
class ForwardChanges:
    """What one forward does differently from stock SGLang.

    Attributes:
        attention, observers: as of a `Part`.
        timing: measures the forward; None = nobody asks.
        before: parts that are computed first, each forgotten then; their logits mean nothing.
        loads: KV that arrives during the forward; None = all is there.
        again: what is done instead where it does not arrive, with the reason.
        tail_lens: rows of each request's ordinary extend; None = of all rows the hidden states are wanted.
        first_rows: requests to verify whose first token follows from this forward, with their places in the batch.
    """

    attention: Attention | None = None
    observers: tuple[Observer, ...] = ()
    timing: contextlib.AbstractContextManager[None] | None = None
    before: list[Part] = field(default_factory=list)
    loads: LayerLoads | None = None
    again: Callable[[str], ForwardBatch] | None = None
    tail_lens: tuple[int, ...] | None = None
    first_rows: tuple[tuple[int, Candidate], ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part], **more: Any) -> ForwardChanges:
        """Of a batch that is computed in `parts`, with `more` of the attributes."""
        *before, last = parts
        return cls(last.attention, last.observers, before=before, **more)

    @property
    def changes_anything(self) -> bool:
        """Whether the forward is not simply SGLang's."""
        extras = (self.attention, self.observers or None, self.timing, self.first_rows or None)
        return any(one is not None for one in extras)


def announce(forward_batch: ForwardBatch, extras: ForwardChanges) -> None:
    """Has the forward of a batch differ from stock SGLang's."""
    setattr(forward_batch, _EXTRAS, extras)


def announced(forward_batch: ForwardBatch) -> ForwardChanges | None:
    """What was announced of a batch; None = its forward is SGLang's alone."""
    changes: ForwardChanges | None = getattr(forward_batch, _EXTRAS, None)
    return changes
