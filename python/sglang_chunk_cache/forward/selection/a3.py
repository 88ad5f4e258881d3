"""A3's scores: how much the question attends to a token, with true Q and true K of an early layer (section 3)."""

from __future__ import annotations

import torch

from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[num_rows]`: sum over the question's tokens of softmax(q k), mean over heads."""
    return rows.question_mass()[rows.positions]
