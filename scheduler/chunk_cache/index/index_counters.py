"""IndexCounters: what happened in the chunk index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class IndexCounters:
    """What happened since the index was made; counts only grow."""

    num_added: int = 0
    num_refreshed: int = 0
    """Variants that were there already: nothing was added, at most their home moved."""
    num_refused: int = 0
    num_superseded: int = 0
    """Derived variants replaced by a better one of the same context, and prepared ones by another."""
    num_dropped_per_chunk: int = 0
    num_dropped_variants: int = 0
    num_dropped_paths: int = 0
    num_dropped_share: int = 0
    """Variants removed because their partition had its share (`partition_share`)."""
    num_gone: int = 0
    """Variants that a lookup or a sweep found no longer stored."""
    num_discarded: int = 0
    num_lookups: int = 0
    num_full: int = 0
    num_partial: int = 0
