"""Tier: one place below the KV pool, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunk_cache.cost import Throughput
from chunk_cache.tier_ledger import EntryId, TierLedger
from sglang_chunk_cache.tiers.base import Medium, VariantInfo

HOST = "host"


@dataclass(frozen=True, eq=False)
class Tier:
    """One tier.

    Attributes:
        name: one of `chunk_cache.tier_config.TIERS`.
        medium: moves its bytes.
        ledger: decides what it keeps.
        reads: how fast it was.
        infos: what the ledger has, by entry id.
    """

    name: str
    medium: Medium
    ledger: TierLedger
    reads: Throughput = field(default_factory=Throughput)
    infos: dict[EntryId, VariantInfo] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Whether its medium is memory of this process, so that it is used without a worker."""
        return self.name == HOST

    def takes(self, info: VariantInfo, max_variants_per_chunk: int) -> bool:
        """Whether it neither has the variant nor enough others of the chunk; a prepared one replaces another."""
        if self.ledger.contains(info.entry_id):
            return False
        if info.is_prepared and self.prepared_of(info.key):
            return True
        return len(self.ledger.entries_of(info.key)) < max_variants_per_chunk

    def prepared_of(self, key: bytes) -> list[VariantInfo]:
        """The prepared variants that it has of a chunk."""
        return [self.infos[entry_id] for entry_id in self.ledger.entries_of(key) if self.infos[entry_id].is_prepared]
