"""kv_deviation by its definition: what tests compare with."""

from __future__ import annotations

import torch

from sgl_kernel_ext.rotary import RotarySpec, turned_by


def kv_deviation_reference(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_old: torch.Tensor,
    v_old: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    position_delta: torch.Tensor | None = None,
    spec: RotarySpec | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[num_tokens] in `dtype`, one token at a time."""
    values = []
    for token in range(k_new.shape[0]):
        at = token if slots is None else int(slots[token])
        k = k_old[at].to(dtype) * k_scale
        if position_delta is not None:
            k = turned_by(k, int(position_delta[token]), spec)
        k_off, v_off = k_new[token].to(dtype) - k, v_new[token].to(dtype) - v_old[at].to(dtype) * v_scale
        values.append((k_off**2).sum() + (v_off**2).sum())
    return torch.stack(values) if values else torch.zeros(0, dtype=dtype)
