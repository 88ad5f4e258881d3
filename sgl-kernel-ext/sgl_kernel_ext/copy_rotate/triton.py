"""copy_rotate in Triton: one launch per layer copies V and copies and rotates K.

The angles are not computed here. cos and sin of every token are made once per call in float64 by torch and read by all
layers, so the kernel is a pure copy in memory terms, and needs no fast-math sine. A program handles a few tokens of
one head; no value leaves the registers between the read and the write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense
from sgl_kernel_ext.rotary import RotarySpec, rotation_table

# Bounds the cos/sin tables and their float64 temporaries to about 40 MB at 128 rotary dimensions.
_TABLE_LEN = 16384
_BLOCK_TOKENS = 8


@triton.jit
def _copy_rotate_kernel(
    k_ptr,
    v_ptr,
    src_ptr,
    dst_ptr,
    delta_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    HALF: tl.constexpr,
    PASS_LEN: tl.constexpr,
    V_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < num_tokens
    # int64: slot * stride passes 2**31 in a large pool.
    src = tl.load(src_ptr + token, mask=is_token, other=0).to(tl.int64)
    dst = tl.load(dst_ptr + token, mask=is_token, other=0).to(tl.int64)
    delta = tl.load(delta_ptr + token, mask=is_token, other=0)
    k_src = k_ptr + src[:, None] * k_slot_stride + head * k_head_stride
    k_dst = k_ptr + dst[:, None] * k_slot_stride + head * k_head_stride

    pair = tl.arange(0, HALF_PAD)[None, :]
    is_pair = is_token[:, None] & (pair < HALF)
    if IS_NEOX:
        first, second = pair, pair + HALF
    else:
        first, second = 2 * pair, 2 * pair + 1
    x = tl.load(k_src + first, mask=is_pair, other=0.0)
    y = tl.load(k_src + second, mask=is_pair, other=0.0)
    cos = tl.load(cos_ptr + token[:, None] * HALF + pair, mask=is_pair, other=1.0)
    sin = tl.load(sin_ptr + token[:, None] * HALF + pair, mask=is_pair, other=0.0)
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    # x * 1 - y * 0 is not x for infinities and negative zeros: a delta of 0 keeps the bits.
    stays = delta[:, None] == 0
    new_x = tl.where(stays, x, (x32 * cos - y32 * sin).to(x.dtype))
    new_y = tl.where(stays, y, (y32 * cos + x32 * sin).to(y.dtype))
    tl.store(k_dst + first, new_x, mask=is_pair)
    tl.store(k_dst + second, new_y, mask=is_pair)

    if PASS_LEN > 0:
        rest = tl.arange(0, PASS_PAD)[None, :]
        is_rest = is_token[:, None] & (rest < PASS_LEN)
        kept = tl.load(k_src + 2 * HALF + rest, mask=is_rest, other=0.0)
        tl.store(k_dst + 2 * HALF + rest, kept, mask=is_rest)

    dim = tl.arange(0, V_PAD)[None, :]
    is_dim = is_token[:, None] & (dim < V_DIM)
    v_src = v_ptr + src[:, None] * v_slot_stride + head * v_head_stride
    v_dst = v_ptr + dst[:, None] * v_slot_stride + head * v_head_stride
    tl.store(v_dst + dim, tl.load(v_src + dim, mask=is_dim, other=0.0), mask=is_dim)


def copy_rotate_triton(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor,
    spec: RotarySpec,
) -> None:
    """`copy_rotate` on CUDA without a host synchronisation; the last dimension of the buffers must be dense."""
    for name, buffers in (("k_buffers", k_buffers), ("v_buffers", v_buffers)):
        for layer, buffer in enumerate(buffers):
            check_dense(**{f"{name}[{layer}]": buffer})
    locs = (src_loc.contiguous(), dst_loc.contiguous(), position_delta.contiguous())
    for src, dst, delta in zip(*(loc.split(_TABLE_LEN) for loc in locs), strict=True):
        cos, sin = rotation_table(spec, delta)
        for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
            _launch(k_buffer, v_buffer, src, dst, delta, cos, sin, spec)


def _launch(
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    delta: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    spec: RotarySpec,
) -> None:
    half, pass_len, v_dim = spec.rotary_dim // 2, k_buffer.shape[2] - spec.rotary_dim, v_buffer.shape[2]
    grid = (triton.cdiv(src.numel(), _BLOCK_TOKENS), k_buffer.shape[1])
    _copy_rotate_kernel[grid](
        k_buffer,
        v_buffer,
        src,
        dst,
        delta,
        cos,
        sin,
        src.numel(),
        k_buffer.stride(0),
        k_buffer.stride(1),
        v_buffer.stride(0),
        v_buffer.stride(1),
        HALF=half,
        PASS_LEN=pass_len,
        V_DIM=v_dim,
        HALF_PAD=triton.next_power_of_2(half),
        PASS_PAD=triton.next_power_of_2(max(pass_len, 1)),
        V_PAD=triton.next_power_of_2(v_dim),
        IS_NEOX=spec.is_neox,
        BLOCK_TOKENS=_BLOCK_TOKENS,
        num_warps=4,
    )
