"""Scores of `question-drift`: how much the question attends to a token over the reused cache (ProphetKV)."""

from __future__ import annotations

import torch

from sglang_chunk_cache.forward.selection.scorer import AskedLayers


def score(asked: AskedLayers) -> torch.Tensor:
    """`[sum of kv_lens]`: column sum of softmax(q_U k), mean over heads, sum over layers."""
    return asked.question_mass()
