"""Level: one tier as the scheduler sees it, and what the tiers need of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from chunk_cache.cost import Throughput
from chunk_cache.tier_ledger import TierLedger
from chunk_cache.variant import Variant
from sglang_chunk_cache.tiers.base import Medium, StoredVariant, VariantInfo

if TYPE_CHECKING:
    from chunk_cache.keys import Partition
    from sglang_chunk_cache.kv.assembler import HostKV
    from sglang_chunk_cache.tiers.stream import LayerStream

HOST = "host"


@dataclass(frozen=True, eq=False)
class Level:
    """One tier.

    Attributes:
        name: `host`, `disk` or `remote`.
        medium: moves bytes.
        ledger: decides what stays.
        reads: how fast it was.
        infos: what the ledger has, by entry id.
    """

    name: str
    medium: Medium
    ledger: TierLedger
    reads: Throughput
    infos: dict[str, VariantInfo] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Its medium is memory of this process, so it is used without a worker."""
        return self.name == HOST

    def takes(self, info: VariantInfo, max_variants_per_chunk: int) -> bool:
        """Whether it neither has the variant nor enough others of the chunk."""
        if self.ledger.contains(info.entry_id):
            return False
        return len(self.ledger.entries_of(info.key.hex())) < max_variants_per_chunk


class Pool(Protocol):
    """The KV pool and its index: `ChunkRadixCache`."""

    def kv_of(self, variant: Variant) -> HostKV | None:
        """K and V of a variant; None where it is not stored in full."""
        ...

    def bring_in(self, stored: StoredVariant, partition: Partition, stream: LayerStream | None) -> bool:
        """Makes a variant of it; False where there is no room. `stream` brings the layers that are not there yet."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether a usable variant of the chunk is in the pool."""
        ...


def info_of(variant: Variant, bytes_per_token: int) -> VariantInfo:
    """What is written beside the KV of a variant of the pool."""
    return VariantInfo(
        key=variant.key,
        token_ids=variant.token_ids,
        start=variant.start,
        generation=variant.generation,
        context=variant.context,
        statistics=variant.statistics,
        payload_len=variant.length * bytes_per_token,
    )
