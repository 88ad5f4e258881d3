"""The part of a recompute plan that is about one chunk; a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from chunk_cache.index.variant import shown_id
from chunk_cache.types import REASONS, Status


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What becomes of one marked chunk."""

    start: int
    end: int
    status: Status
    reason: str | None = None
    variant_id: int | None = None
    """The variant that is brought in; only for a hit, like the fields below."""
    src_offset: int = 0
    """The first token of the variant that is brought in; ``start + src_offset == dst_start``."""
    dst_start: int = 0
    """The prompt position where the load of this chunk begins."""
    num_reused: int = 0
    """Tokens brought in: ``[src_offset, src_offset + num_reused)`` of the variant."""
    generation: int | None = None
    kind: str | None = None
    """How the variant was computed: its `Variant.kind`."""
    shift: int = 0
    """Positions to rotate K by: new start - start at which the variant was computed."""
    cfo: float | None = None
    """Cache fix overhead (Cache-Craft eq. 12), not clipped; None where the context was not known."""
    unit_cfo: float | None = None
    """`cfo` at alpha 1, by which a use is weighed, whatever the budget."""
    other_system: float | None = None
    """The part of `cfo` that comes from a different system prompt; None where it is the same."""
    ranked_by: str | None = None
    """For methods that rank by a statistic of the variant: its name, or ``position`` where none was taken."""

    @property
    def shown_variant(self) -> int | None:
        """The variant as replies name it."""
        return None if self.variant_id is None else shown_id(self.variant_id)

    def __post_init__(self) -> None:
        assert self.reason is None or self.reason in REASONS, f"unknown reason {self.reason!r}"
        assert (self.num_reused > 0) == (self.status is Status.HIT), f"{self.num_reused} tokens of a {self.status}"

    @property
    def is_to_remember(self) -> bool:
        """Whether the chunk is computed, and will be a variant that is not stored yet."""
        return self.status is Status.MISS or self.reason == "high_cfo"

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.num_reused
