"""InfoFlow KV's scores: the norm of the attention that the question gives a token over the reused cache.

The paper (arXiv 2603.05353) scores by an attention norm of the query, at the positions of the prompt. Its code averages
the heads before it takes the norm, at four layers. Ours takes the mean over heads of the squares, at all scored layers.
"""

from __future__ import annotations

import torch

from sglang_chunk_cache.forward.selection.scorer import AskedLayers


def score(asked: AskedLayers) -> torch.Tensor:
    """`[sum of kv_lens]`: column sum of the squares of softmax(q_U k), mean over heads, sum over layers."""
    return asked.question_mass(squared=True)
