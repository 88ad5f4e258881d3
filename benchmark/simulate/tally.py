"""Tally and Outcome: what a replay counted for each request, and what lies in the store at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from benchmark.simulate.settings import Settings

Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over requests. Chunks: prefix + hit + miss + skipped. Tokens: prompt = prefix + reused + computed."""

    num_requests: int
    num_chunks: int
    num_prefix: int
    """Chunks wholly inside the exact prefix."""
    num_hit: int
    num_miss: int
    num_skipped: int
    """Stored but not used; the reason is in `Outcome.reasons`."""
    num_all_hit: int
    """Requests without a chunk that was computed in full."""
    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    unmoved_tokens: int
    """Reused tokens that stand where they were stored, so that requests could share one copy of them."""
    recomputed_tokens: int
    """Reused tokens that are computed again."""
    chunk_tokens: int
    chunk_prefix_tokens: int
    """Tokens of chunks that lie in the exact prefix."""
    stored_tokens: int
    """Tokens in nodes after each request, summed over the requests; see `mean_stored`."""

    @property
    def chunk_hit_rate(self) -> float:
        """Share of the chunks that were not computed in full: exact prefix and hits."""
        return _share(self.num_prefix + self.num_hit, self.num_chunks)

    @property
    def reuse_rate(self) -> float:
        """Share of hits among the chunks that do not lie in the exact prefix."""
        return _share(self.num_hit, self.num_chunks - self.num_prefix)

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens found in the exact prefix or reused."""
        return _share(self.prefix_tokens + self.reused_tokens, self.prompt_tokens)

    @property
    def chunk_token_hit_rate(self) -> float:
        """Share of the tokens of chunks found in the exact prefix or reused."""
        return _share(self.chunk_prefix_tokens + self.reused_tokens, self.chunk_tokens)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found."""
        return self.prompt_tokens - self.prefix_tokens - self.reused_tokens

    @property
    def recomputed_share(self) -> float:
        """Share of the prompt tokens that were reused but recomputed."""
        return _share(self.recomputed_tokens, self.prompt_tokens)

    @property
    def computed_share(self) -> float:
        """Share of the prompt tokens that a prefill computes: not found, or recomputed."""
        return _share(self.computed_tokens + self.recomputed_tokens, self.prompt_tokens)

    @property
    def mean_fix_share(self) -> float:
        """Share of the reused tokens that were recomputed: CFO, weighted by tokens."""
        return _share(self.recomputed_tokens, self.reused_tokens)

    @property
    def unmoved_share(self) -> float:
        """Share of the reused tokens that stand where they were stored."""
        return _share(self.unmoved_tokens, self.reused_tokens)

    @property
    def mean_stored(self) -> float:
        return _share(self.stored_tokens, self.num_requests)


FIELDS = tuple(Tally.__dataclass_fields__)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of one replay."""

    trace: str
    settings: Settings
    per_request: Counts
    """`[num_requests, len(FIELDS)]`."""
    reasons: Mapping[str, int]
    """Chunks by status and reason."""
    variants_per_chunk: Mapping[int, int]
    """At the end: number of stored variants -> number of chunks that have so many."""
    variants_by_chunk: Mapping[int, int]
    """At the end: chunk -> number of its stored variants."""
    generations: Mapping[int, int]
    """At the end: generation -> number of stored variants."""
    cci: Mapping[str, float]
    """Quantiles of CCI over all chunks that were computed to be stored."""
    index: Mapping[str, int]
    """`ChunkIndex.stats()` at the end."""
    peak_stored: int
    end_stored: int
    end_dead: int
    """Tokens of stored nodes whose variant the index has dropped."""
    num_evicted: int
    num_promoted: int
    num_computed: Mapping[int, int]
    """Chunk -> how often it was computed in full."""

    def tally(self, first: int = 0, last: int | None = None) -> Tally:
        """Sums over requests `[first, last)`."""
        return Tally(*(int(value) for value in self.per_request[first:last].sum(axis=0)))

    def windows(self, size: int) -> list[Tally]:
        """Sums over windows of `size` requests; a shorter last window is left out."""
        return [self.tally(i, i + size) for i in range(0, len(self.per_request) - size + 1, size)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
