"""Pool: what the tiers need of the KV pool and its index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from chunk_cache.keys import Partition
    from chunk_cache.need import Need
    from chunk_cache.variant import Variant
    from sglang_chunk_cache.kv.assembler import HostKV
    from sglang_chunk_cache.tiers.base import StoredVariant
    from sglang_chunk_cache.tiers.stream import LayerStream


class Pool(Protocol):
    """The KV pool and its index."""

    def has(self, key: bytes, need: Need) -> bool:
        """Whether a variant of the chunk that fits is in the pool."""
        ...

    def kv_of(self, variant: Variant) -> HostKV | None:
        """K and V of a variant; None where it is not stored in full.

        Raises:
            TierError: full, host memory is used up.
        """
        ...

    def bring_in(self, stored: StoredVariant, partition: Partition, stream: LayerStream | None) -> bool:
        """Makes a variant of it; False where there is no room. `stream` brings the layers that are not there yet."""
        ...
