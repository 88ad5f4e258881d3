"""Grouping (CacheClip section 3.3): a window keeps its selected tokens only where most of it was selected."""

from __future__ import annotations

import numpy as np

from chunk_cache.methods.base import Rows


def group_rows(rows: Rows, *, offset_len: int, chunk_len: int, size: int, threshold: int) -> Rows:
    """The part of `rows` that lies in windows with more than `threshold` of `size` tokens selected.

    Windows are counted from the chunk's first token, so they do not depend on where the reused part begins. The last
    one may be shorter; the same share of it must be selected.

    Args:
        rows: sorted offsets in the reused part; [num_rows].
        offset_len: tokens of the chunk in front of the reused part.
        chunk_len: tokens of the whole chunk.
        size: at least 1.
    """
    if not len(rows):
        return rows
    window = (rows + offset_len) // size
    num_selected = np.bincount(window)[window]
    window_len = np.minimum(size, chunk_len - window * size)
    return rows[num_selected * size > threshold * window_len]
