"""Distance between two distributions of a token, from the log-probabilities of some of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MIN_MASS = 1e-9  # what is left over of a distribution is a difference of numbers that were rounded to fp32


def first_token_kl(reference: Sequence[float], other: Sequence[float]) -> float:
    """KL(reference || other) in nats over the given tokens and one bucket for all the rest.

    Both are log-probabilities of the same tokens. Tokens put together into a bucket can only hide a difference, so this
    is a lower bound of the KL over the whole vocabulary.
    """
    assert len(reference) == len(other), f"{len(reference)} and {len(other)} log-probabilities"
    total = sum(math.exp(p) * (p - q) for p, q in zip(reference, other, strict=True))
    rest, other_rest = (max(_MIN_MASS, 1.0 - sum(map(math.exp, values))) for values in (reference, other))
    return max(0.0, total + rest * (math.log(rest) - math.log(other_rest)))
