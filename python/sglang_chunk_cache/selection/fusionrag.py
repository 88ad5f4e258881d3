"""FusionRAG's scores: how much the question attends to a token over the reused cache (section 3.2)."""

from __future__ import annotations

import torch

from sgl_kernel_ext.attention_mass import attention_mass
from sglang_chunk_cache.selection.base import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[kv_len]`: column sum of softmax(q_U k), mean over heads, of one scored layer."""
    received, _ = attention_mass(
        rows.question_q, rows.keys(), rows.question_positions, sm_scale=rows.sm_scale, logit_cap=rows.logit_cap
    )
    return received / rows.tp_size
