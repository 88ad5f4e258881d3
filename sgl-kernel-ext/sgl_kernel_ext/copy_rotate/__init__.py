"""Copy keys and values to other slots and move the keys to other positions.

    copy_rotate   for every layer: gather K and V of source slots, rotate K by (new - old position), scatter

Only destination slots change. Sources are read-only, and no slot may be a source and a destination in one call, nor a
destination twice: the order of reads and writes is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel_ext.backend import Backend, resolve_backend
from sgl_kernel_ext.rotary import RotarySpec

__all__ = ["copy_rotate"]


def copy_rotate(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor,
    spec: RotarySpec,
    *,
    backend: Backend = "auto",
) -> None:
    """Copy slots `src_loc` to slots `dst_loc` in every layer, keys rotated by `position_delta`.

    The rotation is computed in fp32 (angles in float64) and rounded once to the buffer's dtype. Where the delta is 0
    the copy is exact to the bit, NaN included. Values and the dimensions past `spec.rotary_dim` are exact copies.

    Args:
        k_buffers: one tensor per layer, [num_slots, num_kv_heads, head_dim], fp32, fp16 or bf16; written in place.
        v_buffers: as many, [num_slots, num_kv_heads, v_head_dim]; written in place.
        src_loc, dst_loc: [n] int64 slots on the buffers' device, disjoint; `dst_loc` without repeats.
        position_delta: [n] int64, new position minus old position, may be negative or 0.
        backend: "torch" (any device), "triton" (CUDA, or its interpreter on the CPU), or "auto".

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `backend` is unknown.

    Example:
        >>> spec = RotarySpec(64, True, default_inv_freq(10000.0, 64))
        >>> k, v = torch.zeros(8, 2, 64), torch.zeros(8, 2, 64)
        >>> copy_rotate([k], [v], torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([100, 100]), spec)
    """
    _check(k_buffers, v_buffers, src_loc, dst_loc, position_delta, spec)
    if not len(k_buffers) or not src_loc.numel():
        return
    if resolve_backend(backend, src_loc.device) == "triton":
        from sgl_kernel_ext.copy_rotate.triton import copy_rotate_triton

        copy_rotate_triton(k_buffers, v_buffers, src_loc, dst_loc, position_delta, spec)
    else:
        from sgl_kernel_ext.copy_rotate.naive import copy_rotate_torch

        copy_rotate_torch(k_buffers, v_buffers, src_loc, dst_loc, position_delta, spec)


def _check(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor,
    spec: RotarySpec,
) -> None:
    if len(k_buffers) != len(v_buffers):
        raise ValueError(f"v_buffers: {len(v_buffers)} layers, but k_buffers has {len(k_buffers)}")
    for name, loc in (("src_loc", src_loc), ("dst_loc", dst_loc), ("position_delta", position_delta)):
        if loc.ndim != 1 or loc.dtype != torch.int64 or loc.numel() != src_loc.numel():
            raise ValueError(f"{name}: {loc.dtype} {tuple(loc.shape)}, need int64 [{src_loc.numel()}]")
    for layer, (k, v) in enumerate(zip(k_buffers, v_buffers, strict=True)):
        if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
            raise ValueError(
                f"k_buffers[{layer}] {tuple(k.shape)} and v_buffers[{layer}] {tuple(v.shape)}: "
                "need [num_slots, num_kv_heads, dim] with the same slots and heads"
            )
        if k.shape[2] < spec.rotary_dim:
            raise ValueError(f"k_buffers[{layer}]: head_dim {k.shape[2]} is below rotary_dim {spec.rotary_dim}")
        if not k.dtype == v.dtype or k.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"k_buffers[{layer}]: {k.dtype} and {v.dtype}; need one of float32, float16, bfloat16")
        if k.device != src_loc.device or v.device != src_loc.device:
            raise ValueError(f"k_buffers[{layer}]: on {k.device} and {v.device}, but src_loc is on {src_loc.device}")
