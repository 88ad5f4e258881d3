"""Tier: one place below the KV pool, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunk_cache.tiers.cost import Throughput
from chunk_cache.tiers.placing import HOST
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger
from sglang_chunk_cache.kv.stored_variant import VariantInfo
from sglang_chunk_cache.tiers.medium import Medium

REMOTE = "remote"


@dataclass(frozen=True, eq=False)
class Tier:
    """One tier.

    Attributes:
        name: one of `chunk_cache.options.tier_config.TIERS`.
        medium: moves its bytes.
        ledger: decides what it keeps.
        reads: how fast it was.
        writing: what workers are about to write, or are writing.
        is_asked: it is asked chunk by chunk instead of listed at the start, since other servers may write millions.
    """

    name: str
    medium: Medium
    ledger: TierLedger
    reads: Throughput = field(default_factory=Throughput)
    writing: dict[EntryId, VariantInfo] = field(default_factory=dict)
    is_asked: bool = False

    @property
    def is_host(self) -> bool:
        """Whether its medium is memory of this process, so that it is used without a worker."""
        return self.name == HOST
