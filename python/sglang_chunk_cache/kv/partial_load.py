"""PartialLoads: variants that are in the KV pool already, although not all of their layers have arrived.

Verbs: `open` (a node of the tree waits for its KV), `loads` (a forward reads such nodes layer by layer), `poll` (closes
those whose last layer has arrived, or that failed), `LayerLoads.arrive` (a forward has reached a layer).

Promises: a node is locked in the tree until its KV is whole, so its slots belong to nobody else. A forward waits before
each layer for the KV of that layer, and only if it reads such a node. If a layer does not come, the forward is stopped
on all ranks alike and nothing of the node is ever read again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.variant import Variant
from sgl_kernel_ext.rotary import Turn
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.kv.assembler import KVAssembler, hold
from sglang_chunk_cache.kv.layer_stream import LayerStream
from sglang_chunk_cache.kv.ranks import ReduceMax
from sglang_chunk_cache.kv.store import VariantStore

_COMPLETE, _RUNNING, _FAILED = range(3)  # votes; the largest of all ranks counts


class LayerFailed(Exception):
    """A layer did not come; `reason` is one of those in replies."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a chunk was not loaded to its end: {reason}")
        self.reason = reason


@dataclass(eq=False)
class PartialLoad:
    """One node whose KV arrives: its slots (`[length]` int64 on the device), and the lock that keeps it."""

    variant: Variant
    slots: torch.Tensor
    stream: LayerStream
    lock: Any
    num_filled: int = 0
    opened_at: float = field(default_factory=time.monotonic)
    gave_way: bool = False
    """It failed because the pool needed the room."""

    @property
    def reason(self) -> str:
        """Why it failed, as replies say it."""
        return "memory" if self.gave_way else f"tier_{self.stream.reason}"


@dataclass(frozen=True)
class LayerCopy:
    """What a request copies from a partial load: slots to slots, `[n]` int64, with K turned by `shift` positions."""

    partial: PartialLoad
    source: torch.Tensor
    target: torch.Tensor
    shift: int


class PartialLoads:
    """See the head of this file.

    Args:
        timeout_s: how long a forward waits for layers in total, and a load for its last one.
    """

    def __init__(
        self, index: ChunkIndex, store: VariantStore, assembler: KVAssembler, *, timeout_s: float, reduce_max: ReduceMax
    ) -> None:
        self._index = index
        self._store = store
        self._assembler = assembler
        self.timeout_s = timeout_s
        self._reduce_max = reduce_max
        self._open: dict[int, PartialLoad] = {}

    def open(self, variant: Variant, slots: torch.Tensor, stream: LayerStream) -> None:
        """Locks the node of a variant until its KV has arrived; the index has the variant already."""
        self._open[variant.variant_id] = PartialLoad(variant, slots, stream, self._store.lock(variant))

    def of(self, variant: Variant) -> PartialLoad | None:
        """The partial load of a variant; None if its KV is whole."""
        return self._open.get(variant.variant_id)

    def poll(self) -> None:
        """Closes loads whose stream has ended on all ranks, or has failed on one; once per scheduling step."""
        if not self._open:
            return
        partials = list(self._open.values())
        votes = np.array([self._vote(partial) for partial in partials], dtype=np.int64)
        for partial, vote in zip(partials, self._reduce_max(votes).tolist(), strict=True):
            if vote == _COMPLETE:
                self.fill(partial, partial.stream.num_layers)
                self._close(partial)
            elif vote == _FAILED:
                self.fail(partial)

    def _vote(self, partial: PartialLoad) -> int:
        stream = partial.stream
        if stream.is_complete and stream.reason is None:
            return _COMPLETE
        if time.monotonic() - partial.opened_at > self.timeout_s:
            stream.fail("timeout")
        return _RUNNING if stream.reason is None else _FAILED

    def fail(self, partial: PartialLoad) -> None:
        """Gives up a node whose KV will not come; does nothing if it was given up or closed before."""
        if partial.variant.variant_id in self._open:
            partial.stream.fail("unavailable")
            partial.stream.is_given_up = True
            self._index.discard(partial.variant.variant_id)
            self._close(partial)

    def give_way(self) -> bool:
        """Gives up all nodes, since the pool needs their room: their requests are computed. False if there are none."""
        partials = list(self._open.values())
        for partial in partials:
            partial.gave_way = True
            self.fail(partial)
        return bool(partials)

    def fill(self, partial: PartialLoad, num_layers: int) -> None:
        """Copies the layers below `num_layers`, which have arrived, into the pool."""
        if partial.num_filled < num_layers:
            stored, layers = partial.stream.stored, range(partial.num_filled, num_layers)
            self._assembler.fill(partial.slots, stored.k, stored.v, layers)
            partial.num_filled = num_layers

    def loads(self, copies: Sequence[LayerCopy]) -> LayerLoads:
        """What one forward has to bring in layer by layer."""
        return LayerLoads(self, self._assembler, copies)

    def wait(self, partials: Sequence[PartialLoad], layer: int, deadline: float) -> None:
        """Waits until all of them have a layer, on all ranks.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            LayerFailed: one has not, or gave way: its slots belong to others, whatever its stream has read.
        """
        failed = [
            one for one in partials if one.gave_way or not one.stream.wait(layer, max(0.0, deadline - time.monotonic()))
        ]
        if self._reduce_max(np.array([bool(failed)], dtype=np.int64))[0]:
            raise LayerFailed(failed[0].reason if failed else "tier_ranks")

    def clear(self) -> None:
        """Forgets all of them: the tree was emptied, and its locks with it."""
        self._open.clear()

    def _close(self, partial: PartialLoad) -> None:
        del self._open[partial.variant.variant_id]
        self._store.unlock(partial.lock)


class LayerLoads:
    """See `PartialLoads.loads`; used by one forward."""

    def __init__(self, loads: PartialLoads, assembler: KVAssembler, copies: Sequence[LayerCopy]) -> None:
        self._loads = loads
        self._assembler = assembler
        self._partials = tuple(dict.fromkeys(copy.partial for copy in copies))
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        hold([*sources, *targets, *(partial.slots for partial in self._partials)])
        self._source, self._target = torch.cat(sources), torch.cat(targets)
        shifts = np.array([copy.shift for copy in copies], dtype=np.int64)
        (delta,) = upload([shifts.repeat([len(copy.source) for copy in copies])], self._source.device)
        self._turn = Turn(delta)
        self._num_done = 0
        self._deadline: float | None = None

    def arrive(self, layer: int) -> None:
        """Brings in the KV of a layer whose attention the forward has reached; does nothing if that is done.

        Raises:
            LayerFailed: its KV does not come.
        """
        if layer < self._num_done:
            return
        assert layer == self._num_done, f"layer {layer} comes behind {self._num_done}"
        if self._deadline is None:
            self._deadline = time.monotonic() + self._loads.timeout_s
        self._loads.wait(self._partials, layer, self._deadline)
        for partial in self._partials:
            self._loads.fill(partial, layer + 1)
        self._assembler.copy(self._source, self._target, self._turn, range(layer, layer + 1))
        self._num_done += 1
