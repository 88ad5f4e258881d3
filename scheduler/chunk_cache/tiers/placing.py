"""Placing: which tiers a variant goes to, and which variants it replaces there.

    targets    names the tiers that a variant may go to at a moment
    place      decides to which of them it is written, and names those that have it already
    replace    decides which variants of a chunk an arriving one replaces; None = it is refused

What a full tier evicts is decided by its `TierLedger`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from chunk_cache.tiers.tier_ledger import EntryId, TierLedger, Traits

HOST = "host"
"""The tier that is memory of the process."""


class Moment(Enum):
    """When a variant may be written down."""

    STORED = "stored"
    """It was computed, and is in the pool."""
    LEAVES_POOL = "leaves pool"
    LEAVES_HOST = "leaves host"
    LOADED = "loaded"
    """It came up from a tier."""


@dataclass(frozen=True, slots=True)
class Write:
    """A tier that a variant is written to; the entries that it replaces go first."""

    tier: str
    replaces: tuple[EntryId, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A tier that has the variant already; the reuse frequency counted in the pool is noted there."""

    tier: str


Placing: TypeAlias = Write | Known
K = TypeVar("K")


def place(
    entry_id: EntryId, traits: Traits, tiers: Mapping[str, TierLedger], max_variants_per_chunk: int
) -> tuple[Placing, ...]:
    """What becomes of a variant in each tier that it may go to.

    Args:
        tiers: `targets`, with their ledgers.
    """
    found: list[Placing] = []
    for tier, ledger in tiers.items():
        if ledger.contains(entry_id):
            found.append(Known(tier))
        else:
            replaced = replace(traits, ledger.peers_of(entry_id.key), max_variants_per_chunk)
            if replaced is not None:
                found.append(Write(tier, tuple(replaced)))
    return tuple(found)


def targets(tiers: Sequence[str], moment: Moment, *, write: str) -> tuple[str, ...]:
    """The tiers that a variant may go to.

    With `write: through` it goes to all at once, and when it leaves the pool again, to those that had no room. With
    `write: evict` it goes down by one tier when it leaves the one above. What was loaded goes up into host memory.

    Args:
        tiers: all, the fastest first.
        write: one of `chunk_cache.options.tier_config.WRITES`.
    """
    is_through = write == "through"
    if moment is Moment.LOADED:
        return tuple(tiers[:1]) if tiers and tiers[0] == HOST else ()
    if moment is Moment.STORED:
        return tuple(tiers) if is_through else ()
    if moment is Moment.LEAVES_HOST:
        return () if is_through else tuple(tiers[1:2])
    return tuple(tiers) if is_through else tuple(tiers[:1])


def replace(traits: Traits, peers: Mapping[K, Traits], max_variants_per_chunk: int) -> list[K] | None:
    """The peers that an arriving variant replaces; None = it is refused.

    A prepared variant replaces a prepared one. If the chunk has as many variants as it may, the first in eviction order
    that is not better goes, as in the index.

    Args:
        traits: of the variant that arrives, which is none of `peers`.
        peers: variants of the chunk that are there, in eviction order.
    """
    prepared = [peer for peer, theirs in peers.items() if theirs.is_prepared] if traits.is_prepared else []
    if prepared or len(peers) < max_variants_per_chunk:
        return prepared
    return next(([peer] for peer, theirs in peers.items() if theirs.rank >= traits.rank), None)
