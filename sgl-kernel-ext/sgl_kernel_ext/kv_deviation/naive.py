"""kv_deviation by its definition: what tests compare with."""

from __future__ import annotations

import math

import torch

from sgl_kernel_ext.rotary import RotarySpec


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
        if spec is not None and position_delta is not None:
            k = _turned(k, int(position_delta[token]), spec)
        k_off, v_off = k_new[token].to(dtype) - k, v_new[token].to(dtype) - v_old[at].to(dtype) * v_scale
        values.append((k_off**2).sum() + (v_off**2).sum())
    return torch.stack(values) if values else torch.zeros(0, dtype=dtype)


def _turned(k: torch.Tensor, delta: int, spec: RotarySpec) -> torch.Tensor:
    """One token's K, `[num_kv_heads, head_dim]`: pair i turns by delta x inv_freq[i]."""
    half = spec.rotary_dim // 2
    new = k.clone()
    for i, frequency in enumerate(spec.inv_freq.double().tolist()):
        a, b = (i, i + half) if spec.is_neox else (2 * i, 2 * i + 1)
        cos, sin = math.cos(delta * frequency), math.sin(delta * frequency)
        new[:, a], new[:, b] = k[:, a] * cos - k[:, b] * sin, k[:, b] * cos + k[:, a] * sin
    return new
