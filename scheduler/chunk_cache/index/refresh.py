"""RefreshQueue: derived variants that are worth computing exactly while the server is idle.

Verbs: `note` (how a derived variant can be computed exactly), `take` (the most popular one), `forget`, `clear`.

What is taken depends on the index alone, so all tensor-parallel ranks choose alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.variant import Variant
from chunk_cache.keys import Partition
from chunk_cache.types import Span

MAX_NOTED = 256
"""Most derived variants whose prompts are kept (8 bytes per token); the oldest are dropped."""


@dataclass(frozen=True)
class Origin:
    """How a derived variant can be computed exactly: the prompt up to its end."""

    token_ids: array[int]
    spans: tuple[Span, ...]
    partition: Partition


class RefreshQueue:
    """See the head of this file.

    Args:
        min_uses: uses after which a variant is worth it; 0 = never.
    """

    def __init__(self, index: ChunkIndex, min_uses: int) -> None:
        self._index = index
        self._min_uses = min_uses
        self._origins: OrderedDict[int, Origin] = OrderedDict()

    def note(self, variant: Variant, origin: Origin) -> None:
        """Notes how a derived variant, which was stored, can be computed exactly."""
        if self._min_uses:
            self._origins[variant.variant_id] = origin
            self._origins.move_to_end(variant.variant_id)
            while len(self._origins) > MAX_NOTED:
                self._origins.popitem(last=False)

    def take(self) -> Origin | None:
        """Takes the origin of the most popular variant from the queue; None if none is popular enough."""
        best: Variant | None = None
        for variant_id in list(self._origins):
            variant = self._index.get(variant_id)
            if variant is None:
                del self._origins[variant_id]
            elif variant.num_uses >= self._min_uses and (
                best is None or variant.reuse_frequency > best.reuse_frequency
            ):
                best = variant
        return None if best is None else self._origins.pop(best.variant_id)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forgets the prompts that these chunks are marked in: they would be stored again."""
        gone = set(keys)
        for variant_id in list(self._origins):
            variant = self._index.get(variant_id)
            if variant is None or not gone.isdisjoint((variant.key, *variant.context)):
                del self._origins[variant_id]

    def clear(self) -> None:
        """Forgets everything: the store was emptied."""
        self._origins.clear()
