"""Pool: what the tiers need of the KV pool and its index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from chunk_cache.index.need import Need
    from chunk_cache.index.variant import Variant
    from chunk_cache.keys import Partition
    from sglang_chunk_cache.kv.assembler import HostKV
    from sglang_chunk_cache.kv.layer_stream import LayerStream
    from sglang_chunk_cache.kv.stored_variant import StoredVariant


class Pool(Protocol):
    """The KV pool and its index."""

    def kv_of(self, variant: Variant) -> HostKV | None:
        """A variant in host memory; None where it is not stored in full, or nobody would reuse it.

        Raises:
            TierError: full, host memory is used up.
        """
        ...

    def bring_in(self, stored: StoredVariant, need: Need, partition: Partition, stream: LayerStream | None) -> bool:
        """Makes a variant of it, where the pool has none that is as good; False where there is no room.

        Args:
            need: where it is needed.
            stream: brings the layers that are not there yet.
        """
        ...
