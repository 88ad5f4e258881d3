"""ChunkStatistics: what the attention did with a chunk's tokens when its KV was computed.

They are taken once and stored with the variant. Methods rank tokens by them (`chunk_cache.methods.ranked`), and they
are weighed against a new context (`index.reusability`). All are softmax masses averaged over the heads and the layers
that the server samples:

    outside    per token, on what stands in front of its chunk: sum_j mass(t -> C_j) over the chunks before it, or
               mass(t -> S) where there were none (Cache-Craft section 3.2; S, the system prompt, is no context chunk)
    received   per token, from later tokens of its chunk (H2O section 4; not from itself)
    inter      per context chunk j, summed over the tokens: inter(C_j, C_i) (Cache-Craft eq. 3)
    intra      of all tokens on earlier tokens of their own chunk, without the diagonal (eq. 4); only CCI is kept of it
    system     per piece of S (`chunk_cache.index.system_prompt`), the mean over the tokens: a share of their attention
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from chunk_cache.index.reusability import context_impact

STATISTICS = ("outside", "received")
"""Statistics that tokens can be ranked by."""

Values: TypeAlias = npt.NDArray[np.float32]

_NONE: Values = np.empty(0, dtype=np.float32)


class ChunkStatistics:
    """The statistics of a variant, in one read-only array: 8 bytes per token, 4 per context chunk and piece of S.

    Args:
        outside, received: `[chunk length]` float32; NaN where a token's KV was not computed but found.
        inter: `[num context chunks]` float32.
        cci: chunk context impact, in [0.5, 1].
        system: `[num pieces]` float32.
    """

    __slots__ = ("_num_context", "_num_system", "_values")

    def __init__(
        self,
        outside: Values,
        received: Values,
        inter: Values = _NONE,
        cci: float = 0.5,
        system: Values = _NONE,
    ) -> None:
        assert outside.shape == received.shape, f"{outside.shape}, {received.shape}"
        self._values: Values = np.concatenate((outside, received, system, inter, (cci,)), dtype=np.float32)
        self._values.setflags(write=False)
        self._num_context, self._num_system = len(inter), len(system)

    @property
    def outside(self) -> Values:
        return self._values[: self._num_tokens]

    @property
    def received(self) -> Values:
        return self._values[self._num_tokens : 2 * self._num_tokens]

    @property
    def inter(self) -> Values:
        return self._values[-1 - self._num_context : -1]

    @property
    def system(self) -> Values:
        return self._values[2 * self._num_tokens : -1 - self._num_context]

    @property
    def cci(self) -> float:
        return float(self._values[-1])

    def of_context(self) -> tuple[list[float], float]:
        """`inter` and `cci` at once: what every lookup asks of every variant."""
        tail = self._values[-1 - self._num_context :].tolist()
        return tail, tail.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkStatistics) and self.tobytes() == other.tobytes()

    def tobytes(self) -> bytes:
        """Bytes that are equal where all numbers are, bit for bit."""
        sizes = (self._num_context, self._num_system)
        return b"".join(size.to_bytes(4, "little") for size in sizes) + self._values.tobytes()

    @property
    def _num_tokens(self) -> int:
        return (len(self._values) - 1 - self._num_context - self._num_system) // 2

    @classmethod
    def taken(
        cls,
        outside: Values,
        received: Values,
        inter: Values,
        intra: float,
        context_lens: Sequence[int],
        system: Values = _NONE,
    ) -> ChunkStatistics:
        """The statistics of a chunk behind chunks of `context_lens` tokens, with its context impact.

        `inter`, `intra` and `system` are sums over the tokens that were computed. If these are only a part of the
        chunk, the others are assumed to be like them.
        """
        num_computed = int((~np.isnan(outside)).sum())
        assert num_computed, "statistics of a chunk of which nothing was computed"
        scale = len(outside) / num_computed
        inter, intra = inter * np.float32(scale), intra * scale
        cci = context_impact(inter, context_lens, intra, len(outside))
        return cls(outside, received, inter, cci, system / np.float32(num_computed))

    def behind(self, num_context: int, num_pieces: int) -> ChunkStatistics:
        """The same for KV that was fixed behind `num_context` other pieces and a system prompt of `num_pieces` pieces.

        Its attention to each of the former is unknown (0); that to its own system prompt counts for the new one, piece
        by piece.
        """
        inter, system = np.zeros(num_context, np.float32), np.zeros(num_pieces, np.float32)
        common = min(num_pieces, self._num_system)
        system[:common] = self.system[:common]
        if common:
            system[common - 1] += self.system[common:].sum()
        return ChunkStatistics(self.outside, self.received, inter, self.cci, system)

    def filled_from(self, other: ChunkStatistics | None) -> ChunkStatistics:
        """These numbers, and those of `other` for tokens that have none here (their KV was found, not computed).

        `inter`, `cci` and `system` are numbers for many tokens at once: those taken over more tokens stay.
        """
        if other is None or not np.isnan(self.outside).any():
            return self
        mine, theirs = (int(np.isnan(one.outside).sum()) for one in (self, other))
        fuller = self if mine <= theirs else other
        filled = [
            np.where(np.isnan(own), found, own)
            for own, found in ((self.outside, other.outside), (self.received, other.received))
        ]
        return ChunkStatistics(filled[0], filled[1], fuller.inter, fuller.cci, fuller.system)

    def of(self, name: str) -> Values | None:
        """One of `STATISTICS`; None where nothing is known of single tokens, as in a simulation."""
        assert name in STATISTICS, f"unknown statistic {name!r}"
        values: Values = getattr(self, name)
        return values if len(values) else None
