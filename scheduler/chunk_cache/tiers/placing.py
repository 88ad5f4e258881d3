"""Placing: which tiers a variant goes to, and what has to go there for it.

    targets    the tiers that a variant may go to at a moment
    place      in which of them it is written, and which have it already
    replace    what of a chunk goes when another variant of it arrives; None = the newcomer is not taken

What a tier evicts because it is full is its `TierLedger`'s to say.
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
    """A tier that a variant is written to; those it replaces go before."""

    tier: str
    replaces: tuple[EntryId, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A tier that has the variant: what its use has counted in the pool is noted there."""

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

    With `write: through` it goes to all at once, and again when it leaves the pool, to those that had no room. With
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
    """What goes when a variant arrives; None = it is not taken.

    A prepared variant replaces another. Where there are enough of the chunk, the one that goes first of those that are
    not better goes, as in the index.

    Args:
        traits: of the variant that arrives, which is none of `peers`.
        peers: variants of the chunk that are there, in the order in which they go.
    """
    prepared = [peer for peer, theirs in peers.items() if theirs.is_prepared] if traits.is_prepared else []
    if prepared or len(peers) < max_variants_per_chunk:
        return prepared
    return next(([peer] for peer, theirs in peers.items() if theirs.rank >= traits.rank), None)
