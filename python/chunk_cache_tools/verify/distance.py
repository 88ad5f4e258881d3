"""Distance between two distributions of a token, from log-probabilities of a part of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MIN_MASS = 1e-9  # least mass of the rest, which is 1 minus a sum of numbers rounded to fp32


def first_token_kl(reference: Sequence[float], other: Sequence[float]) -> float:
    """KL(reference || other) in nats over the given tokens and one bucket for all the rest.

    Both arguments are log-probabilities of the same tokens. A bucket of many tokens can only hide a difference, so the
    result is a lower bound of the KL over the whole vocabulary.
    """
    assert len(reference) == len(other), f"{len(reference)} and {len(other)} log-probabilities"
    total = sum(math.exp(p) * (p - q) for p, q in zip(reference, other, strict=True))
    rest, other_rest = (max(_MIN_MASS, 1.0 - sum(map(math.exp, values))) for values in (reference, other))
    return max(0.0, total + rest * (math.log(rest) - math.log(other_rest)))
