"""Synthetic attention: the statistics that a model would have taken of a chunk in a context, without a model.

Every query token spends `INSIDE` of its attention on earlier tokens of its chunk and, on the chunk c at distance d in
front of it (d = 1: its neighbour),

    OUTSIDE * own(chunk) * pair(chunk, c) * d^-DECAY          own, pair: lognormal with median 1

so that inter[j] = length * that share and intra = length * INSIDE; the project's own `context_impact` computes CCI
from them. `own` says how much a chunk attends to others at all, `pair` how much two chunks belong together. Both are
hashes of (seed, keys): the same chunk in the same context always has the same statistics, in whatever order they are
asked for.

The rest of a token's attention lies on the system prompt: `FIRST_TOKEN` of the rest on the first token, the remainder
on the other pieces, by d^-DECAY from the last one. The model is a measurement on Qwen2.5-Coder-0.5B, six passages of
HotpotQA behind 1,450 tokens of this documentation, mean of the layers that the server samples: 0.30 on the first
token, 0.08 on the other pieces (half of that on the last 30 %), 0.50 on the own chunk.

The constants put CCI between 0.5 and 0.9 for prompts of five chunks, as in the examples of Cache-Craft (figure 18: 0.4,
0.5, 0.7, 0.8; equation 11 allows no 0.4). The papers print no distribution of CCI; `cci_quantiles` returns ours.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.reusability import context_impact

INSIDE = 0.4
OUTSIDE = 0.06
DECAY = 0.5
OWN_SPREAD = 0.5
PAIR_SPREAD = 1.0
FIRST_TOKEN = 0.8
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

_UNIT = 2.0**-32
_NO_TOKENS: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


class SyntheticAttention:
    """Statistics by (chunk, context); its only state is a cache of its hashes."""

    def __init__(self, seed: int) -> None:
        self._salt = seed.to_bytes(8, "little")
        self._pair = lru_cache(maxsize=1 << 18)(self._draw_pair)
        self._own = lru_cache(maxsize=1 << 16)(self._draw_own)

    def inter(self, key: bytes, length: int, context: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """Attention mass of the chunk on each context chunk, float32 `[num_context]`."""
        own, num = OUTSIDE * self._own(key), len(context)
        shares = [own * self._pair(key, other) * (num - j) ** -DECAY for j, other in enumerate(context)]
        return np.array(shares, dtype=np.float32) * np.float32(length)

    def statistics(
        self, key: bytes, length: int, context: Sequence[bytes], context_lens: Sequence[int], num_pieces: int = 0
    ) -> ChunkStatistics:
        """Statistics that would be stored with the variant, without rankings of its tokens, which are not used here.

        Args:
            num_pieces: pieces of the system prompt (`chunk_cache.index.system_prompt`); 0 = it is ignored.
        """
        inter = self.inter(key, length, context)
        cci = context_impact(inter, context_lens, INSIDE * length, length)
        system = self.system(max(0.0, 1.0 - INSIDE - float(inter.sum()) / length), num_pieces)
        return ChunkStatistics(_NO_TOKENS, _NO_TOKENS, inter=inter, cci=cci, system=system)

    def system(self, left: float, num_pieces: int) -> npt.NDArray[np.float32]:
        """Shares of the pieces of a system prompt in the attention that is `left` for it, `[num_pieces]`."""
        if num_pieces < 2:
            return np.full(num_pieces, left, dtype=np.float32)
        near = np.arange(num_pieces - 1, 0, -1, dtype=np.float32) ** -DECAY
        return np.float32(left) * np.concatenate(
            ([FIRST_TOKEN], (1.0 - FIRST_TOKEN) * near / near.sum()), dtype=np.float32
        )

    def _draw_own(self, key: bytes) -> float:
        return math.exp(OWN_SPREAD * _normal(self._salt, key))

    def _draw_pair(self, key: bytes, other: bytes) -> float:
        return math.exp(PAIR_SPREAD * _normal(self._salt, key, other))


def cci_quantiles(values: Sequence[float]) -> dict[str, float]:
    """The `QUANTILES` of CCI by name ("p05", …); empty without values."""
    if not values:
        return {}
    return {f"p{round(100 * q):02d}": float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}


def _normal(*parts: bytes) -> float:
    """A standard normal number that depends only on the bytes (Box and Muller 1958)."""
    word = int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")
    first, second = ((word & 0xFFFFFFFF) + 1) * _UNIT, (word >> 32) * _UNIT
    return math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second)
