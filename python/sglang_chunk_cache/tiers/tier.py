"""Tier: one place below the KV pool, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunk_cache.tiers.cost import Throughput
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger
from sglang_chunk_cache.kv.stored_variant import VariantInfo
from sglang_chunk_cache.tiers.medium import Medium

HOST, REMOTE = "host", "remote"


@dataclass(frozen=True, eq=False)
class Tier:
    """One tier.

    Attributes:
        name: one of `chunk_cache.options.tier_config.TIERS`.
        medium: moves its bytes.
        ledger: decides what it keeps.
        reads: how fast it was.
        writing: what workers are about to write, or are writing.
        is_asked: it is not listed when a server begins but asked for each chunk, since others may write millions to it.
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

    def has(self, info: VariantInfo) -> bool:
        return self.ledger.contains(info.entry_id)

    def goes_for(self, info: VariantInfo, max_variants_per_chunk: int) -> list[EntryId] | None:
        """What goes when a variant that it does not have arrives; None = it is not taken.

        A prepared one replaces another. Where there are enough of the chunk, the one that goes first of those that are
        not better goes, as in the index.
        """
        peers = {entry_id: self.ledger.traits_of(entry_id) for entry_id in self.ledger.entries_of(info.key)}
        prepared = [peer for peer, traits in peers.items() if traits.is_prepared] if info.is_prepared else []
        if prepared or len(peers) < max_variants_per_chunk:
            return prepared
        not_better = [peer for peer, traits in peers.items() if traits.rank >= info.rank]
        return [self.ledger.first_of(not_better)] if not_better else None
