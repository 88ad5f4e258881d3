"""A3's scores: how much the question attends to a token, with true Q and true K of an early layer (equation 3)."""

from __future__ import annotations

import torch

from sglang_chunk_cache.forward.selection.scorer import AskedLayers


def score(rows: AskedLayers) -> torch.Tensor:
    """`[sum of kv_lens]`: sum over the question's tokens of softmax(q k), mean over heads."""
    return rows.question_mass()
