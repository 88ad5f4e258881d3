"""Cache-Craft's equations 6 to 8 and 12 one by one, as the paper has them: what `unit_cfo` does in one pass."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt


def prefix_overlap(context: Sequence[Hashable], inter: npt.ArrayLike, new_context: Sequence[Hashable]) -> float:
    """beta in [0, 1]: the share of the outside mass that lies on chunks of the new context (eq. 6).

    Where the old context is empty, 1 if the new one is too, else 0. Where nothing in the old context was attended to,
    its chunks count alike.
    """
    if not context:
        return float(not new_context)
    masses = np.asarray(inter, dtype=np.float64).tolist()
    common = [mass for chunk, mass in zip(context, masses, strict=True) if chunk in new_context]
    if len(common) == len(context):
        return 1.0  # however sums are rounded
    return min(1.0, sum(common) / sum(masses)) if sum(masses) else len(common) / len(context)


def order_penalty(context: Sequence[Hashable], new_context: Sequence[Hashable]) -> float:
    """gamma in [0, 1]: discordant pairs of the common chunks over all their pairs; 0 for fewer than two (eq. 7).

    A chunk that stands in a context more than once counts where it stands first.
    """
    common = [chunk for chunk in dict.fromkeys(context) if chunk in new_context]
    pairs = list(combinations(common, 2))
    num_discordant = sum(new_context.index(first) > new_context.index(second) for first, second in pairs)
    return num_discordant / len(pairs) if pairs else 0.0


def adjusted_overlap(beta: float, gamma: float) -> float:
    """beta' in [0, beta] (eq. 8)."""
    return beta * (1.0 - gamma)


def fix_overhead(alpha: float, cci: float, adjusted: float) -> float:
    """CFO (eq. 12), at least 0; it may be above 1, since variants are compared before it is clipped."""
    return alpha * cci * (1.0 - adjusted)
