"""Actions: what `ChunkManager` decides, for whoever moves KV to carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chunk_cache.index.need import Described, Need
from chunk_cache.index.variant import Variant
from chunk_cache.tiers.variant_search import Held


@dataclass(frozen=True, slots=True)
class Keep:
    """A chunk of a prompt to remember: where it lies in its path, or in a home of its own."""

    chunk: int
    generation: int
    in_path: bool
    is_prepared: bool = False
    fixed: int | None = None
    """Id of the variant that was fixed for the prompt; None where the chunk was computed."""


@dataclass(frozen=True, slots=True)
class Forgo:
    """A chunk that was computed and is not remembered, and why."""

    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class Promote:
    """A variant at the end of a cold path to copy to a home of its own."""

    variant: Variant
    priority: int
    """Eviction priority of the home."""


class Arriving(Described, Protocol):
    """A variant that comes up from a tier."""

    @property
    def key(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Accept:
    """A variant from a tier that goes into the pool, in a home of its own."""

    variant: Arriving
    priority: int
    """Eviction priority of the home."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A chunk of a prompt that is looked for in the tiers below the pool."""

    chunk: int
    need: Need
    held: Held
    """What the pool has; only something better is of use."""
