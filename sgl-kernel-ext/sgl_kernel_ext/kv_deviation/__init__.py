"""Deviation of key and value from what was stored: CacheBlend's measure of how wrong a reused token is.

    kv_deviation   per token ||K_new - K_old||^2 + ||V_new - V_old||^2 over all heads (CacheBlend section 4.1; squared
                   as in FusionRAG's equation 7); or that of V alone

The old K and V may be given token by token, or as the pool's buffers with the slots of the tokens; an old K that was
stored for another position is turned on the way.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext.backend import Backend, resolve_backend
from sgl_kernel_ext.rotary import RotarySpec, rotate, rotation_table

__all__ = ["kv_deviation"]


def kv_deviation(
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
    only_v: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Squared deviation per token, in fp32 whatever the dtype.

    Args:
        k_new: [num_tokens, num_kv_heads, head_dim].
        v_new: [num_tokens, num_kv_heads, v_head_dim].
        k_old, v_old: the same shapes, or [num_slots, ...] with `slots`; fp8 too.
        slots: [num_tokens] int64, where the old K and V of each token lie; None = token i at i.
        position_delta: [num_tokens] int64, by how many positions the old K is turned first; None = it is at the new
            position already. Given together with `spec`.
        spec: the model's rotation.
        k_scale, v_scale: the old K and V are these times what is stored; for fp8.
        only_v: ||V_new - V_old||^2 alone; K is not read.

    Returns:
        [num_tokens] fp32, over the heads of this tensor-parallel rank; the sum over ranks is the deviation.

    Raises:
        ValueError: shapes or dtypes do not fit together, or only one of `position_delta` and `spec` is given.
    """
    _check(k_new, v_new, k_old, v_old, slots, position_delta, spec)
    if k_new.shape[0] and resolve_backend(backend, k_new.device, "kv_deviation") == "triton":
        from sgl_kernel_ext.kv_deviation.triton import kv_deviation_triton

        return kv_deviation_triton(
            k_new, v_new, k_old, v_old, slots, position_delta, spec, k_scale=k_scale, v_scale=v_scale, only_v=only_v
        )
    of_v = _squared(v_new, v_old if slots is None else v_old[slots], v_scale)
    if only_v:
        return of_v
    k_old = k_old if slots is None else k_old[slots]
    if position_delta is not None and spec is not None:
        k_old = _turned(k_old, position_delta, spec)
    return _squared(k_new, k_old, k_scale) + of_v


def _turned(k: torch.Tensor, position_delta: torch.Tensor, spec: RotarySpec) -> torch.Tensor:
    """`[num_tokens, num_kv_heads, head_dim]` fp32."""
    cos, sin = (table[:, None] for table in rotation_table(spec, position_delta))
    old = k.float()
    new = torch.empty_like(old)
    rotate(old, new, cos, sin, spec)
    return new


def _squared(new: torch.Tensor, old: torch.Tensor, scale: float) -> torch.Tensor:
    difference = torch.sub(new.flatten(1).float(), old.flatten(1).float(), alpha=scale)
    return torch.linalg.vecdot(difference, difference)


def _check(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_old: torch.Tensor,
    v_old: torch.Tensor,
    slots: torch.Tensor | None,
    position_delta: torch.Tensor | None,
    spec: RotarySpec | None,
) -> None:
    skipped = 0 if slots is None else 1  # with slots, new and old differ in their number
    shapes_fit = k_new.shape[skipped:] == k_old.shape[skipped:] and v_new.shape[skipped:] == v_old.shape[skipped:]
    if not shapes_fit or k_new.shape[0] != v_new.shape[0] or k_old.shape[0] != v_old.shape[0]:
        raise ValueError(
            f"k_new {tuple(k_new.shape)}, k_old {tuple(k_old.shape)}, v_new {tuple(v_new.shape)}, "
            f"v_old {tuple(v_old.shape)}: need the same shape of new and old, and as many tokens of K as of V"
        )
    for name, index in (("slots", slots), ("position_delta", position_delta)):
        if index is not None and (index.shape != k_new.shape[:1] or index.dtype != torch.int64):
            raise ValueError(f"{name}: {index.dtype} {tuple(index.shape)}, need int64 ({k_new.shape[0]},)")
    if (position_delta is None) != (spec is None):
        raise ValueError("position_delta, spec: give both, to turn the old K, or none")
    if spec is not None and spec.rotary_dim > k_new.shape[2]:
        raise ValueError(f"spec: {spec.rotary_dim} rotary dimensions, but heads have {k_new.shape[2]}")
