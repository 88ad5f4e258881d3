"""Lookup: which stored variant of a chunk a prompt may use, and how much of it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from chunk_cache.index.need import Need, system_charge
from chunk_cache.index.peers import beside_prepared, ranked
from chunk_cache.index.variant import Variant
from chunk_cache.types import REASONS

Resolve: TypeAlias = Callable[[Variant], int]
"""How many leading tokens of the variant are still stored; 0 = gone."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The variant of a chunk that a prompt may be given, or why there is none."""

    variant: Variant | None
    covered_len: int
    """Leading tokens of the chunk that are stored; 0 without a variant."""
    reason: str | None
    """Why there is no variant; None when there is one."""
    unit_cfo: float | None = None
    """`Need.unit_cfo` of the variant, in [0, 2]; None where it was not asked for."""
    other_system: float | None = None
    """The part of `unit_cfo` that comes from a different system prompt; None if it is the same, or not asked for."""

    @property
    def share_to_compute(self) -> float:
        """Share of the chunk to compute: tokens not stored, and `unit_cfo` of the others; 1 without a variant."""
        if self.variant is None:
            return 1.0
        return 1.0 - (1.0 - (self.unit_cfo or 0.0)) * self.covered_len / self.variant.length

    def __post_init__(self) -> None:
        assert (self.variant is None) == (self.covered_len == 0), f"{self.covered_len} tokens of {self.variant}"
        assert (self.variant is None) == (self.reason is not None), f"variant {self.variant}, reason {self.reason}"
        assert self.reason is None or self.reason in REASONS, f"unknown reason {self.reason!r}"


NOTHING = {reason: Lookup(None, 0, reason) for reason in REASONS}
"""Lookups that find no variant, by reason."""


def best_of(peers: Sequence[Variant], resolve: Resolve, need: Need | None, forget: Callable[[Variant], None]) -> Lookup:
    """The best of a chunk's variants; see `ChunkIndex.lookup`.

    Args:
        forget: told of each variant that `resolve` finds gone, at once.
    """
    allowed, obstacle = (list(peers), None) if need is None else need.sort_out(peers)
    for prepared in [p for p in allowed if p.is_prepared and resolve(p) == 0]:
        forget(prepared)
        allowed.remove(prepared)
    allowed.sort(key=lambda variant: -variant.last_use)
    best: Variant | None = None
    best_len, best_cfo, best_share = 0, None, 1.0
    for cfo, variant in ranked(beside_prepared(allowed), need):
        if best is not None and best_share <= (cfo or 0.0):
            break  # even if stored in full, it and all behind it are no better
        covered_len = resolve(variant)
        assert 0 <= covered_len <= variant.length, f"{covered_len} tokens stored of {variant}"
        if covered_len == 0:
            forget(variant)
            continue
        share = 1.0 - (1.0 - (cfo or 0.0)) * covered_len / variant.length
        if best is None or share < best_share:
            best, best_len, best_cfo, best_share = variant, covered_len, cfo, share
    if best is None:
        return NOTHING[obstacle or "evicted"]
    charge = None if need is None or best.system == need.system else system_charge(best, need.system)
    return Lookup(best, best_len, None, best_cfo, charge)
