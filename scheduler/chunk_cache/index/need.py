"""Need: where a prompt needs a chunk, and which of its variants may be used there.

    Need.obstacle, fits, unit_cfo   of a variant, in the pool or below it
    Need.sort_out                   which of several may be used, and what hinders the others
    system_charge                   what of the CFO another system prompt costs

To what the context costs (`reusability`), the share of its attention that lay on what is another system
prompt now is added. Of a variant without statistics nothing is known but what stood in front of it: CCI is 1, its
context chunks count alike, and all of it owes to its system prompt. A prepared one is meant for any context: it costs
`PREPARED_CFO`, whatever stands in front.
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
"""Reasons why a variant is not used, whatever it costs; of those of several variants a reply says the first."""
PREPARED_CFO = 0.5
"""At alpha 1: the least that a variant costs behind a context that it was not computed behind."""


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
    """See the head of this file; asked for several variants, so what follows from it alone is found once."""

    max_generation: int
    """Variants above it are not used."""
    context: tuple[bytes, ...] = ()
    """What stands in front of it, as `Variant.context`."""
    system: bytes = b""
    """Marks of the system prompt in front of these (`chunk_cache.index.system_prompt`)."""
    is_system_fixed: bool = False
    """Whether variants behind another system prompt, or other text between chunks, are not used."""
    is_trust_limited: bool = False
    """Whether variants that were computed behind other chunks are not used, unless they are prepared."""
    max_unit_cfo: float = math.inf
    """Largest unit CFO of a variant that is used; above it the chunk is computed instead."""

    def obstacle(self, variant: Described) -> str | None:
        """Which of `OBSTACLES` a variant has; None = it may be used."""
        if variant.generation > self.max_generation:
            return "generation_limit"
        if self.is_trust_limited and variant.context and not variant.is_prepared:
            return "untrusted"
        if self.is_system_fixed and (variant.system != self.system or self._has_other_text(variant)):
            return "other_system"
        return None

    def sort_out(self, variants: Iterable[_Variant]) -> tuple[list[_Variant], str | None]:
        """Those that may be used, in their order, and the first of `OBSTACLES` that others have."""
        found = [(one, self.obstacle(one)) for one in variants]
        obstacles = {obstacle for _, obstacle in found}
        allowed = [one for one, obstacle in found if obstacle is None]
        return allowed, next((one for one in OBSTACLES if one in obstacles), None)

    def _has_other_text(self, variant: Described) -> bool:
        """Whether a text between chunks stood in front of it that does not now, such as a turn of a conversation."""
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
        """CFO at alpha 1 of a variant that is used here, in [0, 2]: variants are compared before it is clipped."""
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


def system_charge(variant: Described, system: bytes) -> float:
    """In [0, 1]; 0 where nothing stood in front of it."""
    if not variant.system:
        return 0.0
    statistics = variant.statistics
    return 1.0 if statistics is None else share_elsewhere(statistics.system, variant.system, system)
