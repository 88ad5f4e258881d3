"""A3's scores: how much the question attends to a token, with true Q and true K of an early layer (section 3)."""

from __future__ import annotations

import torch

from sgl_kernel_ext.attention_mass import attention_mass
from sglang_chunk_cache.selection.base import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[num_rows]`: sum over the question's tokens of softmax(q k), mean over heads."""
    received, _ = attention_mass(
        rows.question_q, rows.keys(), rows.question_positions, sm_scale=rows.sm_scale, logit_cap=rows.logit_cap
    )
    return received[rows.positions] / rows.tp_size
