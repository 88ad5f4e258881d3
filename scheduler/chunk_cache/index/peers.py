"""Peers: the variants of one chunk, of which a lookup takes the best.

The rule of what is best, `beside_prepared` and `order_of`, is the same in the pool and in the tiers below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from chunk_cache.index.need import Described, Need
from chunk_cache.index.variant import Variant

Behind: TypeAlias = tuple[bytes, tuple[bytes, ...]]
"""What a variant was computed behind: the marks of its system prompt, and its context."""
Order: TypeAlias = tuple[float, int]
"""Smaller is better."""
V = TypeVar("V", bound=Described)


def behind(variant: Variant) -> Behind:
    return variant.system, variant.context


def find_same(peers: Iterable[Variant], start: int, place: Behind, is_prepared: bool) -> Variant | None:
    wanted = start, is_prepared, place
    return next((peer for peer in peers if (peer.start, peer.is_prepared, behind(peer)) == wanted), None)


def is_superseded(peer: Variant, generation: int, place: Behind, is_prepared: bool, is_same: bool) -> bool:
    """Whether an arriving variant replaces `peer`; a prepared one replaces any prepared one of its system prompt."""
    if is_prepared or peer.is_prepared:
        return is_prepared and peer.is_prepared and peer.system == place[0]
    return peer.generation > 0 and behind(peer) == place and (is_same or not generation)


def order_of(cost: float, generation: int) -> Order:
    """Place of a variant among those of its chunk; the smallest is used.

    Args:
        cost: CFO at alpha 1, plus the cost of loading if the variant lies in a tier.
    """
    return cost, generation


def beside_prepared(variants: Sequence[V]) -> Sequence[V]:
    """The variants that may be chosen: if one is prepared, other derived ones are passed over."""
    if not any(variant.is_prepared for variant in variants):
        return variants
    return [variant for variant in variants if variant.is_prepared or not variant.generation]


def ranked(variants: Iterable[Variant], need: Need | None) -> list[tuple[float | None, Variant]]:
    """Variants, best first, each with its CFO at alpha 1 for `need`; equal ones keep their order."""
    found = []
    for variant in variants:
        cfo = None if need is None else need.unit_cfo(variant)
        found.append((order_of(cfo or 0.0, variant.generation), cfo, variant))
    found.sort(key=lambda item: item[0])
    return [(cfo, variant) for _, cfo, variant in found]


def check_peers(chunks: Mapping[bytes, Sequence[Variant]], variants: Iterable[Variant], max_per_chunk: int) -> None:
    """Compares the variants listed by chunk with all variants.

    Raises:
        AssertionError: they differ, or some of one chunk may not stand beside each other.
    """
    by_key: dict[bytes, set[int]] = {}
    for variant in variants:
        by_key.setdefault(variant.key, set()).add(variant.variant_id)
    listed = {key: {v.variant_id for v in peers} for key, peers in chunks.items()}
    assert listed == by_key, f"chunks list {listed}, variants say {by_key}"
    for peers in chunks.values():
        assert len(peers) <= max_per_chunk, f"{len(peers)} variants of one chunk: {peers}"
        assert len({v.variant_id for v in peers}) == len(peers), f"a chunk lists a variant twice: {peers}"
        assert len({v.length for v in peers}) == 1, f"one key, different lengths: {peers}"
        others = [v for v in peers if not v.is_prepared]
        prepared = [v for v in peers if v.is_prepared]
        assert len({v.system for v in prepared}) == len(prepared), f"two prepared variants behind one prompt: {peers}"
        assert all(v.generation <= 1 for v in prepared), f"a prepared variant behind approximate KV: {peers}"
        places = {(v.start, behind(v)) for v in others}
        assert len(places) == len(others), f"one KV is represented twice: {peers}"
        exact = {behind(v) for v in others if v.is_exact}
        assert not any(v.generation and behind(v) in exact for v in others), f"derived beside exact: {peers}"
