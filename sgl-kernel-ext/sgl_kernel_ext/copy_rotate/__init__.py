"""Copy keys and values to other slots and move the keys to other positions.

    copy_rotate   for every layer: gather K and V of source slots, rotate K by (new - old position), scatter

Only destination slots change. Sources are read-only, and no slot may be a source and a destination in one call, nor a
destination twice: the order of reads and writes is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel_ext.backend import Backend, resolve_backend
from sgl_kernel_ext.rotary import RotarySpec, Turn

__all__ = ["copy_rotate"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def copy_rotate(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor | Turn,
    spec: RotarySpec,
    *,
    backend: Backend = "auto",
) -> None:
    """Copy slots `src_loc` to slots `dst_loc` in every layer, keys rotated by `position_delta`.

    The rotation is computed in fp32 (angles in float64) and rounded once to the buffer's dtype. Where the delta is 0
    the copy is exact to the bit, NaN included. Values and the dimensions past `spec.rotary_dim` are exact copies.

    fp8 needs no scale: a rotation is linear, so one scale of a whole tensor cancels. A rotation can make a component
    larger by sqrt(2): what leaves the finite range of the fp8 format becomes its largest number, infinities of e5m2
    included; NaN stays NaN. SGLang keeps such pools as uint8 (`store_dtype`): pass `buffer.view(torch.float8_e4m3fn)`,
    which is not a copy.

    Args:
        k_buffers: one tensor per layer, [num_slots, num_kv_heads, head_dim], fp32, fp16, bf16, float8_e4m3fn or
            float8_e5m2; written in place. Layers may differ in everything but the device; equal ones are faster.
        v_buffers: as many, [num_slots, num_kv_heads, v_head_dim], each of the dtype of its K; written in place.
        src_loc, dst_loc: [n] int64 slots on the buffers' device, disjoint; `dst_loc` without repeats.
        position_delta: [n] int64, new position minus old position, may be negative or 0; a `Turn` of them where other
            layers follow.
        backend: "torch" (any device), "triton" (CUDA, or its interpreter on the CPU), or "auto".

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `backend` is unknown; with "triton" also where
            the last dimension of a buffer is strided. The message names the argument. Slots are not checked.

    Example:
        >>> spec = RotarySpec(64, True, default_inv_freq(10000.0, 64))
        >>> k, v = torch.zeros(8, 2, 64), torch.zeros(8, 2, 64)
        >>> copy_rotate([k], [v], torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([100, 100]), spec)
    """
    turn = Turn.of(position_delta)
    _check(k_buffers, v_buffers, src_loc, dst_loc, turn.by, spec)
    if not len(k_buffers) or not src_loc.numel():
        return
    if resolve_backend(backend, src_loc.device, "copy_rotate") == "triton":
        from sgl_kernel_ext.copy_rotate.triton import copy_rotate_triton

        copy_rotate_triton(k_buffers, v_buffers, src_loc, dst_loc, turn, spec)
    else:
        from sgl_kernel_ext.copy_rotate.naive import copy_rotate_torch

        copy_rotate_torch(k_buffers, v_buffers, src_loc, dst_loc, turn.by, spec)


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
        if loc.device != src_loc.device:
            raise ValueError(f"{name}: on {loc.device}, but src_loc is on {src_loc.device}")
    for layer, (k, v) in enumerate(zip(k_buffers, v_buffers, strict=True)):
        for name, buffer in ((f"k_buffers[{layer}]", k), (f"v_buffers[{layer}]", v)):
            if buffer.ndim != 3:
                raise ValueError(f"{name}: shape {tuple(buffer.shape)}, need [num_slots, num_kv_heads, dim]")
            if buffer.dtype not in _DTYPES:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                hint = "; pass uint8 pools of fp8 as .view(fp8 dtype)" if buffer.dtype == torch.uint8 else ""
                raise ValueError(f"{name}: {buffer.dtype}, need one of {names}{hint}")
            if buffer.device != src_loc.device:
                raise ValueError(f"{name}: on {buffer.device}, but src_loc is on {src_loc.device}")
        if v.dtype != k.dtype:
            raise ValueError(f"v_buffers[{layer}]: {v.dtype}, but k_buffers[{layer}] is {k.dtype}")
        if v.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"v_buffers[{layer}]: shape {tuple(v.shape)}, need the slots and heads of k_buffers[{layer}], "
                f"{tuple(k.shape[:2])}"
            )
        if k.shape[2] < spec.rotary_dim:
            raise ValueError(f"k_buffers[{layer}]: head_dim {k.shape[2]} is below rotary_dim {spec.rotary_dim}")
