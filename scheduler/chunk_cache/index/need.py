"""Need: where a prompt needs a chunk, and which of its variants may be used there.

    Need.obstacle, fits, unit_cfo   of a variant, in the pool or below it
    Need.sort_out                   which of several may be used, and what hinders the others
    is_trusted                      whether others may have steered a variant
    system_charge                   the part of the CFO that comes from a different system prompt

The CFO of a variant is what its context costs (`reusability`), plus the share of its attention that lay on the part of
its system prompt that differs now. For a variant without statistics the worst is assumed: CCI is 1, its context chunks
count alike, and all its attention lay on the system prompt. A prepared variant is meant for any context, which
costs `PREPARED_CFO` whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.reusability import first_places, unit_cfo
from chunk_cache.index.system_prompt import share_elsewhere
from chunk_cache.keys import text_names

OBSTACLES = ("other_system", "untrusted", "generation_limit")
"""Reasons why a variant is not used, whatever it costs; if several variants have one, a reply gives the first."""
PREPARED_CFO = 0.5
"""At alpha 1: the least that a variant costs if nothing of its context stands in front of it again."""


class Described(Protocol):
    """What is known of a variant wherever it lies; see `chunk_cache.index.variant.Variant`."""

    @property
    def generation(self) -> int: ...
    @property
    def is_prepared(self) -> bool: ...
    @property
    def system(self) -> bytes: ...
    @property
    def context(self) -> tuple[bytes, ...]: ...
    @property
    def statistics(self) -> ChunkStatistics | None: ...


_Variant = TypeVar("_Variant", bound=Described)


@dataclass(frozen=True)
class Need:
    """See the head of this file. It is asked about several variants, so what depends on it alone is cached."""

    max_generation: int
    """Variants of a higher generation are not used."""
    context: tuple[bytes, ...] = ()
    """What stands in front of the chunk, as `Variant.context`."""
    system: bytes = b""
    """Marks of the system prompt in front of these (`chunk_cache.index.system_prompt`)."""
    is_system_fixed: bool = False
    """Whether variants behind another system prompt, or other text between chunks, are not used."""
    is_trust_limited: bool = False
    """Whether only variants are used that were computed alone, or prepared."""
    max_unit_cfo: float = math.inf
    """Largest unit CFO of a variant that is used; above it the chunk is computed instead."""

    def obstacle(self, variant: Described) -> str | None:
        """Which of `OBSTACLES` a variant has; None = it may be used."""
        if variant.generation > self.max_generation:
            return "generation_limit"
        if self.is_trust_limited and not is_trusted(variant):
            return "untrusted"
        if self.is_system_fixed and (variant.system != self.system or self._has_other_text(variant)):
            return "other_system"
        return None

    def sort_out(self, variants: Iterable[_Variant]) -> tuple[list[_Variant], str | None]:
        """The variants that may be used, in their order, and the first of `OBSTACLES` that others have."""
        found = [(one, self.obstacle(one)) for one in variants]
        obstacles = {obstacle for _, obstacle in found}
        allowed = [one for one, obstacle in found if obstacle is None]
        return allowed, next((one for one in OBSTACLES if one in obstacles), None)

    def _has_other_text(self, variant: Described) -> bool:
        """Whether it was computed behind a text between chunks, such as a turn of a chat, that is not there now."""
        return not variant.is_prepared and not text_names(variant.context) <= self._texts

    @cached_property
    def _texts(self) -> frozenset[bytes]:
        return text_names(self.context)

    @cached_property
    def _place(self) -> Mapping[Hashable, int]:
        return first_places(self.context)

    def fits(self, variant: Described) -> bool:
        """Whether it may be used, and does not cost too much."""
        is_bounded = self.max_unit_cfo < math.inf
        return self.obstacle(variant) is None and not (is_bounded and self.unit_cfo(variant) > self.max_unit_cfo)

    def unit_cfo(self, variant: Described) -> float:
        """CFO at alpha 1 of a variant that is used here, in [0, 2]; not clipped, so that variants can be compared."""
        cfo = self._context_cfo(variant)
        return cfo if variant.system == self.system else cfo + system_charge(variant, self.system)

    def _context_cfo(self, variant: Described) -> float:
        if variant.is_prepared:
            return PREPARED_CFO
        context, statistics, place = variant.context, variant.statistics, self._place
        if statistics is None:
            return unit_cfo(1.0, context, [0.0] * len(context), self.context, place)
        if context and place.keys().isdisjoint(context):  # most variants
            return statistics.cci
        inter, cci = statistics.of_context()
        return unit_cfo(cci, context, inter, self.context, place)


def is_trusted(variant: Described) -> bool:
    """Whether no other request's passages can have steered a variant: it was computed alone, or warmed.

    A derived variant may have learnt from chunks behind it too (`drift`), so that its context tells too little.
    """
    return variant.is_prepared or not (variant.context or variant.generation)


def system_charge(variant: Described, system: bytes) -> float:
    """Part of the CFO, in [0, 1], that comes from a different system prompt; 0 if the variant had none."""
    if not variant.system:
        return 0.0
    statistics = variant.statistics
    return 1.0 if statistics is None else share_elsewhere(statistics.system, variant.system, system)
