"""kv_deviation in Triton: one program per token, which reads the old K and V in their slots and turns the old K.

Limited by memory: new and old K and V are read once, four bytes per token are written. A program holds all heads of its
token; the shift by a rotation costs no further pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.rotary import RotarySpec, rotation_table
from sgl_kernel_ext.triton_parts import fp8_options, load_fp32, pairs


@triton.jit
def _sum_of_squares(
    new_ptr, old_ptr, head, new_head_stride, old_head_stride, dim, mask, scale,
    MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    new = tl.load(new_ptr + head * new_head_stride + dim, mask=mask, other=0).to(tl.float32)
    old = load_fp32(old_ptr, head * old_head_stride + dim, mask, MANTISSA, HAS_FP8) * scale
    return tl.sum((new - old) * (new - old))


# The alignment of an index must not compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["slots_ptr"])
def _kv_deviation_kernel(
    k_new_ptr,
    v_new_ptr,
    k_old_ptr,
    v_old_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    k_scale,
    v_scale,
    k_new_stride,
    k_new_head_stride,
    v_new_stride,
    v_new_head_stride,
    k_old_stride,
    k_old_head_stride,
    v_old_stride,
    v_old_head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_LEN: tl.constexpr,
    PASS_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    # int64: token * stride passes 2**31 in a large pool.
    token = tl.program_id(0).to(tl.int64)
    old_token = token
    if HAS_SLOTS:
        old_token = tl.load(slots_ptr + token).to(tl.int64)
    k_new_ptr += token * k_new_stride
    v_new_ptr += token * v_new_stride
    k_old_ptr += old_token * k_old_stride
    v_old_ptr += old_token * v_old_stride
    head = tl.arange(0, HEADS_PAD)[:, None]
    is_head = head < NUM_HEADS

    dim = tl.arange(0, V_PAD)[None, :]
    total = _sum_of_squares(
        v_new_ptr, v_old_ptr, head, v_new_head_stride, v_old_head_stride, dim, is_head & (dim < V_DIM), v_scale,
        MANTISSA, HAS_FP8,
    )  # fmt: skip
    if PASS_LEN > 0:
        rest = tl.arange(0, PASS_PAD)[None, :]
        at = 2 * HALF + rest
        mask = is_head & (rest < PASS_LEN)
        total += _sum_of_squares(
            k_new_ptr, k_old_ptr, head, k_new_head_stride, k_old_head_stride, at, mask, k_scale, MANTISSA, HAS_FP8
        )
    if HALF > 0:
        pair = tl.arange(0, HALF_PAD)[None, :]
        mask = is_head & (pair < HALF)
        first, second = pairs(pair, HALF, IS_NEOX)
        cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=1.0)
        sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)
        x = load_fp32(k_old_ptr, head * k_old_head_stride + first, mask, MANTISSA, HAS_FP8) * k_scale
        y = load_fp32(k_old_ptr, head * k_old_head_stride + second, mask, MANTISSA, HAS_FP8) * k_scale
        new_x = tl.load(k_new_ptr + head * k_new_head_stride + first, mask=mask, other=0.0).to(tl.float32)
        new_y = tl.load(k_new_ptr + head * k_new_head_stride + second, mask=mask, other=0.0).to(tl.float32)
        off_x = new_x - (x * cos - y * sin)
        off_y = new_y - (y * cos + x * sin)
        total += tl.sum(off_x * off_x + off_y * off_y)
    tl.store(out_ptr + token, total)


def kv_deviation_triton(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_old: torch.Tensor,
    v_old: torch.Tensor,
    slots: torch.Tensor | None,
    position_delta: torch.Tensor | None,
    spec: RotarySpec | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    only_v: bool = False,
) -> torch.Tensor:
    """`kv_deviation` without a host synchronisation; the last dimension of all four must be dense."""
    check_dense(k_new=k_new, v_new=v_new, k_old=k_old, v_old=v_old)
    num_tokens, num_heads, head_dim = k_new.shape
    out = torch.empty(num_tokens, dtype=torch.float32, device=k_new.device)
    half, is_neox, cos, sin = 0, True, out, out
    if spec is not None and position_delta is not None and not only_v:
        half, is_neox = spec.rotary_dim // 2, spec.is_neox
        cos, sin = rotation_table(spec, position_delta)
    pass_len, v_dim = 0 if only_v else head_dim - 2 * half, v_new.shape[2]
    _kv_deviation_kernel[(num_tokens,)](
        k_new,
        v_new,
        raw(k_old),
        raw(v_old),
        out if slots is None else slots.contiguous(),
        cos,
        sin,
        out,
        float(k_scale),
        float(v_scale),
        *k_new.stride()[:2],
        *v_new.stride()[:2],
        *k_old.stride()[:2],
        *v_old.stride()[:2],
        NUM_HEADS=num_heads,
        HEADS_PAD=triton.next_power_of_2(num_heads),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(max(half, 1)),
        PASS_LEN=pass_len,
        PASS_PAD=triton.next_power_of_2(max(pass_len, 1)),
        V_DIM=v_dim,
        V_PAD=triton.next_power_of_2(v_dim),
        IS_NEOX=is_neox,
        HAS_SLOTS=slots is not None,
        **fp8_options(k_old.dtype),
        num_warps=4,
    )
    return out
