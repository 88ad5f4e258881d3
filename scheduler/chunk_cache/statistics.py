"""ChunkStatistics: what the attention did with a chunk's tokens when its KV was computed, one number per token each.

Taken once, stored with the variant, and ranked by (`chunk_cache.methods.ranked`). Both are softmax masses averaged over
the heads and the layers that the server samples:

    outside    of the token, on what stands in front of its chunk: sum_j mass(t -> C_j) over the chunks before it, or
               mass(t -> S) where there were none (Cache-Craft section 3.2; S is never a context chunk)
    received   by the token, from the tokens of its chunk behind it (H2O section 4; itself not counted)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STATISTICS = ("outside", "received")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkStatistics:
    """Read-only arrays, `[chunk length]` float32; NaN where a token's KV was not computed but found."""

    outside: npt.NDArray[np.float32]
    received: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        assert self.outside.shape == self.received.shape, f"{self.outside.shape}, {self.received.shape}"
        for name in STATISTICS:
            self.of(name).setflags(write=False)

    def filled_from(self, other: ChunkStatistics | None) -> ChunkStatistics:
        """These numbers, and those of `other` for tokens that have none here (their KV was found, not computed)."""
        if other is None or not np.isnan(self.outside).any():
            return self
        pairs = ((self.of(name), other.of(name)) for name in STATISTICS)
        return ChunkStatistics(*(np.where(np.isnan(mine), theirs, mine) for mine, theirs in pairs))

    def of(self, name: str) -> npt.NDArray[np.float32]:
        """One of `STATISTICS`."""
        assert name in STATISTICS, f"unknown statistic {name!r}"
        values: npt.NDArray[np.float32] = getattr(self, name)
        return values
