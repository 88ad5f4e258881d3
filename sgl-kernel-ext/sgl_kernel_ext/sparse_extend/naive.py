"""sparse_extend by its definition, one request and head at a time with full scores: what tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sparse_extend_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor | Sequence[int],
    kv_indices: torch.Tensor,
    row_indptr: torch.Tensor | Sequence[int],
    row_positions: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[num_rows, num_q_heads, v_head_dim] in `dtype`, everything computed in it."""
    num_rows, num_q_heads, _ = q.shape
    group = num_q_heads // k_buffer.shape[1]
    out = torch.empty(num_rows, num_q_heads, v_buffer.shape[2], dtype=dtype, device=q.device)
    for request in range(len(kv_indptr) - 1):
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        rows = slice(int(row_indptr[request]), int(row_indptr[request + 1]))
        distance = row_positions[rows, None] - torch.arange(slots.numel(), device=q.device)
        visible = (distance >= 0) & ((distance <= window) | (window < 0))
        for head in range(num_q_heads):
            k = k_buffer[slots, head // group].to(dtype) * k_scale
            # A key nobody sees may hold NaN, and 0 * NaN is NaN.
            v = torch.where(visible.any(0)[:, None], v_buffer[slots, head // group].to(dtype) * v_scale, 0)
            scores = q[rows, head].to(dtype) @ k.T * sm_scale
            if logit_cap > 0:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(dtype).expand(len(scores), 1)], dim=1)
            out[rows, head] = torch.softmax(scores, dim=-1)[:, : slots.numel()] @ v
    return out
