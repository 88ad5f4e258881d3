"""Reusability: how far a variant's KV can be trusted behind other chunks (Cache-Craft sections 3.1 and 3.2).

    context_impact    CCI   how much the KV owes to what stood in front of it                        eq. 9 to 11
    unit_cfo          CFO   = CCI (1 - beta (1 - gamma)) at alpha 1, not clipped yet                 eq. 8 and 12
                      beta  the share of that whose chunks stand in front of it again                eq. 6
                      gamma how far the common chunks stand in another order (Kendall's tau)         eq. 7
    share_to_fix            alpha CFO clipped to [0, 1]: the share of its tokens that is recomputed  section 3.2.1
    use_weight              what one use adds to a variant's reuse frequency f_r                     section 3.3

`mass` is attention summed over tokens and averaged over heads and layers: `inter[j]` on context chunk j, `intra` on
earlier tokens of the chunk itself. A context is the chunks in front of a chunk, in order; what another system prompt
costs is added (`chunk_cache.index.system_prompt`).
Where the paper leaves a case open, the function says what is done. All are pure. Those that every lookup calls for
every variant are plain Python: contexts have about ten chunks, where numpy takes longer, and of longer ones only the
last `NEAREST` are compared.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Mass: TypeAlias = npt.NDArray[np.floating]
Context: TypeAlias = Sequence[Hashable]

NEAREST = 64
"""Pieces right in front of a chunk that `unit_cfo` compares one by one. Earlier ones are common only all together: if
the new context begins with them. So a lookup takes as long for a variant in a prompt of a thousand pieces as in one of
sixty.
"""


def context_impact(inter: Mass, context_lens: Sequence[int], intra: float, length: int) -> float:
    """CCI in [0.5, 1]: sigmoid of (mass per token pair outside the chunk / mass per token pair inside) (eq. 9 to 11).

    0.5 without a context, and where nothing in it is attended to. 1 where the chunk does not attend to itself: a chunk
    of one token has no earlier ones.

    Args:
        inter: `[num_context]`.
        context_lens: tokens of each context chunk, at least 1.
        length: tokens of the chunk, at least 1.
    """
    assert len(inter) == len(context_lens), f"{len(inter)} masses of {len(context_lens)} chunks"
    outside = float(np.sum(np.asarray(inter, dtype=np.float64) / np.asarray(context_lens))) / length
    if outside == 0.0:
        return 0.5
    inside = intra / length**2
    return 1.0 / (1.0 + math.exp(-outside / inside)) if inside > 0.0 else 1.0


def first_places(new_context: Context) -> dict[Hashable, int]:
    """Where each chunk of a context stands first."""
    return dict(zip(reversed(new_context), range(len(new_context) - 1, -1, -1), strict=True))


def unit_cfo(
    cci: float, context: Context, inter: Sequence[float], new_context: Context, place: Mapping[Hashable, int]
) -> float:
    """CFO at alpha 1, in [0, 1], of KV that was computed behind `context` and is used behind another.

    All in one pass, since it is called for every variant of every chunk of every prompt. Two things differ from the
    paper's equations: `NEAREST`, and KV that was computed alone, of which they say nothing (beta is 0/0), costs 1
    behind anything, since it loses most (`docs/variants.md`). beta does not depend on the order; a chunk that stands
    in a context more than once counts where it stands first.

    Args:
        place: `first_places` of the new context.
    """
    if not context:
        return 0.0 if not new_context else 1.0
    num_far = max(0, len(context) - NEAREST)
    common, ranks = _common(context[num_far:], inter[num_far:], place)
    num_common = len(ranks)
    if num_far and context[:num_far] == new_context[:num_far]:
        common, num_common, ranks = common + sum(inter[:num_far]), num_common + num_far, [-1, *ranks]
    beta = _beta(common, sum(inter), num_common, len(context))
    return cci * (1.0 - beta * (1.0 - _discordance(ranks)))


def share_to_fix(cfo: float) -> float:
    """The share of a chunk's tokens that is recomputed, in [0, 1] (section 3.2.1)."""
    return min(1.0, max(0.0, cfo))


def use_weight(cfo: float, length: int) -> float:
    """What one use of a variant of `length` tokens adds to f_r: 1 / CFO (section 3.3).

    A use that needs no fixing would count without bound; it counts as one that fixes a single token.
    """
    return min(1.0 / cfo, float(length)) if cfo > 0.0 else float(length)


def _common(context: Context, inter: Sequence[float], place: Mapping[Hashable, int]) -> tuple[float, list[int]]:
    """The mass on common chunks, and where these stand in the new context, in the order of the old one."""
    ranks = []
    common = 0.0
    for chunk, mass in zip(context, inter, strict=True):
        rank = place.get(chunk)
        if rank is not None:
            ranks.append(rank)
            common += mass
    return common, ranks


def _beta(common: float, total: float, num_common: int, length: int) -> float:
    """Share of the mass that is common, or of the chunks if there is no mass; exactly 1 if all chunks are common."""
    if num_common == length:
        return 1.0
    return min(1.0, common / total) if total else num_common / length


def _discordance(ranks: Sequence[int]) -> float:
    """Share of the pairs of `ranks` that are in descending order; of equal ranks only the first counts."""
    ranks = list(dict.fromkeys(ranks))
    m = len(ranks)
    if m < 2:
        return 0.0
    earlier: list[int] = []
    num_discordant = 0
    for rank in ranks:
        at = bisect(earlier, rank)
        num_discordant += len(earlier) - at
        earlier.insert(at, rank)
    return num_discordant / (m * (m - 1) / 2)
