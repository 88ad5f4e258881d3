"""LayerStream: the KV of one chunk that arrives layer by layer while a forward already needs it.

Verbs: `run_until` (a worker reads up to a layer), `run_all` (the rest of several), `wait` (the forward needs a layer).

Promises: a layer counts as there once its bytes are verified and in place. A stream that fails stays failed, with its
reason, and wakes whoever waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from sglang_chunk_cache.kv.stored_variant import Layer, StoredVariant, TierError

logger = logging.getLogger(__name__)


class LayerStream:
    """See the head of this file.

    Args:
        stored: its tensors are written, layer by layer.
        layers: of the medium, in order.
        tier: name of the tier that they come from.
    """

    def __init__(self, stored: StoredVariant, layers: Iterator[Layer], tier: str) -> None:
        self.stored = stored
        self.tier = tier
        self.num_layers = stored.k.shape[0]
        self.num_ready = 0
        self.reason: str | None = None
        """Why it failed, a reason of `TierError`; None = it did not."""
        self.is_given_up = False
        """Whether all ranks have given it up, at the same step; it may have failed earlier on one."""
        self.has_begun = False
        """Whether a worker was told to read it to its end."""
        self.seconds = 0.0
        """Spent on reading so far."""
        self._layers = layers
        self._changed = threading.Condition()

    @property
    def is_complete(self) -> bool:
        return self.num_ready == self.num_layers

    def run_until(self, num_layers: int) -> None:
        """Reads until so many layers are there, or it has failed; in a worker."""
        start = time.perf_counter()
        try:
            while self.num_ready < min(num_layers, self.num_layers) and self.reason is None:
                layer, k, v = next(self._layers)
                self.stored.k[layer].copy_(k)
                self.stored.v[layer].copy_(v)
                with self._changed:
                    self.num_ready = layer + 1
                    self._changed.notify_all()
        except TierError as error:
            logger.warning("Chunk cache: a chunk was not read to its end: %s", error)
            self.fail(error.reason)
        self.seconds += time.perf_counter() - start

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Waits until a layer is there; False if it failed, or took longer than `timeout_s`."""
        with self._changed:
            is_there = self._changed.wait_for(lambda: self.num_ready > layer or self.reason is not None, timeout_s)
        if not is_there:
            self.fail("timeout")
        return self.num_ready > layer

    def fail(self, reason: str) -> None:
        """Marks the stream as failed; the first reason stays."""
        with self._changed:
            self.reason = self.reason or reason
            self._changed.notify_all()


def run_all(streams: Sequence[LayerStream]) -> None:
    """Reads the rest of streams that one forward reads, layer by layer as it will need them; in a worker."""
    for layer in range(max(stream.num_layers for stream in streams)):
        for stream in streams:
            stream.run_until(layer + 1)
