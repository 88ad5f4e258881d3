"""The system prompt S: what stands in front of the first chunk of a prompt. Every chunk is computed behind it.

    piece_starts     where S is cut
    marks_of         the marks of S: if two S begin alike, so do their marks
    num_pieces       the number of pieces of S, from its marks
    share_elsewhere  the share of a chunk's attention that lay on the part of S that differs now

S is compared piece by piece, so that a date or a user's name at its end costs only the attention that the chunk gave to
that end. The first token is a piece of its own, since it gets most of the attention to the beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from chunk_cache.keys import TokenIds, int64_buffer

PIECE = 64
"""Tokens of a piece; the first has one token, the second one less than this, and the last may be shorter."""

_MARK_LEN = 8
_PERSON = b"system-prompt-1"


def piece_starts(length: int) -> list[int]:
    """0, 1, `PIECE`, 2 `PIECE`, ... below `length`; none of an empty S."""
    return [0, 1, *range(PIECE, length, PIECE)] if length > 1 else [0] * length


def marks_of(system: TokenIds) -> bytes:
    """The marks of S, `_MARK_LEN` bytes per piece: each is a hash of S up to the end of its piece.

    Args:
        system: token ids of S.
    """
    tokens = memoryview(int64_buffer(system))
    hasher, marks = hashlib.blake2b(digest_size=_MARK_LEN, person=_PERSON), b""
    for start, end in pairwise([*piece_starts(len(tokens)), len(tokens)]):
        hasher.update(tokens[start:end])
        marks += hasher.digest()
    return marks


def num_pieces(marks: bytes) -> int:
    """Number of pieces of the system prompt that has these marks."""
    return len(marks) // _MARK_LEN


def share_elsewhere(shares: Sequence[float] | np.ndarray, marks: bytes, new_marks: bytes) -> float:
    """Share of a chunk's attention, in [0, 1], that lay on S from the first piece on in which the new S differs.

    Args:
        shares: `[pieces]`, shares of its attention on the pieces of the S that it was computed behind.
        marks: of that S.
        new_marks: of the S that it is used behind.
    """
    if marks == new_marks:
        return 0.0
    same, end = 0, min(len(marks), len(new_marks))
    while same < end and marks[same : same + _MARK_LEN] == new_marks[same : same + _MARK_LEN]:
        same += _MARK_LEN
    return min(1.0, float(sum(np.asarray(shares)[same // _MARK_LEN :].tolist())))  # few, and asked of every variant
