"""InfoFlow KV's scores: the norm of the attention that the question gives a token over the reused cache.

Of the paper (arXiv 2603.05353) we have the abstract: an attention norm of the query, at the positions of the prompt.
*Ours*: the norm is the Euclidean one, over the question's tokens, the heads and the scored layers.
"""

from __future__ import annotations

import torch

from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[kv_len]`: column sum of the squares of softmax(q_U k), mean over heads, of one scored layer."""
    return rows.question_mass(squared=True)
