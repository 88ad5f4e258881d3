"""kv_deviation by its definition: what tests compare with."""

from __future__ import annotations

import torch


def kv_deviation_reference(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_old: torch.Tensor,
    v_old: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[num_tokens] in `dtype`, one token at a time."""
    pairs = ((k_new, k_old), (v_new, v_old))
    tokens = range(k_new.shape[0])
    values = [sum(((new[t].to(dtype) - old[t].to(dtype)) ** 2).sum() for new, old in pairs) for t in tokens]
    return torch.stack(values) if values else torch.zeros(0, dtype=dtype)
