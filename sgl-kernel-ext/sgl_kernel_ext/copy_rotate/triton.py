"""copy_rotate in Triton: one launch copies V and copies and rotates K in all layers of one layout.

The angles are not computed here. cos and sin of every token are made once per call in float64 by torch and read by all
layers, so the kernel is limited by memory like a copy, and needs no fast-math sine. A table of addresses on the device
says where the layers lie. A program handles some heads of some tokens of one layer: neighbouring heads are neighbours
in memory, and share the cos and sin of their token. No value leaves the registers between the read and the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense
from sgl_kernel_ext.rotary import RotarySpec, Turn
from sgl_kernel_ext.triton_parts import (
    ELEMENTS,
    AddressTable,
    addresses,
    fp8_of_fp32,
    fp8_options,
    fp32_of_fp8,
    pointer_at,
)

# Elements of K that a program holds, and as many of V: at 128 threads two or four 16-byte words each. A block takes as
# many heads as it can (2 KB in a row at 128 dimensions of two bytes), then tokens, but so few that a short chunk gives
# every multiprocessor a program. Not tuned on a GPU yet.
_TILE_LEN = 4096
_MAX_BLOCK_HEADS = 8
_MAX_BLOCK_TOKENS = 16


# --- the kernel -------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(x, y, cos, sin, stays, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    """Turns both halves of the pairs; results are in the dtype that the halves came in."""
    if MANTISSA > 0:
        x32, y32 = fp32_of_fp8(x, MANTISSA, HAS_FP8), fp32_of_fp8(y, MANTISSA, HAS_FP8)
        new_x = fp8_of_fp32(x32 * cos - y32 * sin, MANTISSA, HAS_FP8)
        new_y = fp8_of_fp32(y32 * cos + x32 * sin, MANTISSA, HAS_FP8)
    else:
        x32, y32 = x.to(tl.float32), y.to(tl.float32)
        new_x = (x32 * cos - y32 * sin).to(x.dtype)
        new_y = (y32 * cos + x32 * sin).to(y.dtype)
    # x * 1 - y * 0 is not x for infinities and negative zeros: a delta of 0 keeps the bits.
    return tl.where(stays, x, new_x), tl.where(stays, y, new_y)


# A count of tokens or the alignment of an index must not compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["k_ptrs", "v_ptrs", "src_ptr", "dst_ptr", "delta_ptr", "num_tokens"])
def _copy_rotate_kernel(
    k_ptrs,
    v_ptrs,
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
    DTYPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HALF: tl.constexpr,
    PASS_LEN: tl.constexpr,
    V_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NUM_HEAD_BLOCKS: tl.constexpr,
):
    layer = tl.program_id(1)
    k_ptr = pointer_at(k_ptrs, layer, DTYPE, IS_ALIGNED)
    v_ptr = pointer_at(v_ptrs, layer, DTYPE, IS_ALIGNED)
    token = tl.program_id(0) // NUM_HEAD_BLOCKS * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = token < num_tokens
    # int64: slot * stride passes 2**31 in a large pool.
    src = tl.load(src_ptr + token, mask=is_token, other=0).to(tl.int64)
    dst = tl.load(dst_ptr + token, mask=is_token, other=0).to(tl.int64)
    stays = (tl.load(delta_ptr + token, mask=is_token, other=0) == 0)[:, None, None]
    head = (tl.program_id(0) % NUM_HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    is_token = is_token[:, None, None]
    # [BLOCK_TOKENS, BLOCK_HEADS, 1] here, dimensions of a head last.
    k_src = k_ptr + (src * k_slot_stride)[:, None, None] + (head * k_head_stride)[None, :, None]
    k_dst = k_ptr + (dst * k_slot_stride)[:, None, None] + (head * k_head_stride)[None, :, None]
    v_src = v_ptr + (src * v_slot_stride)[:, None, None] + (head * v_head_stride)[None, :, None]
    v_dst = v_ptr + (dst * v_slot_stride)[:, None, None] + (head * v_head_stride)[None, :, None]

    # All reads come first, so that they wait for memory together: the compiler may not move a read before a write.
    dim = tl.arange(0, V_PAD)[None, None, :]
    is_dim = is_token & (dim < V_DIM)
    v = tl.load(v_src + dim, mask=is_dim)
    if PASS_LEN > 0:
        rest = 2 * HALF + tl.arange(0, PASS_PAD)[None, None, :]
        is_rest = is_token & (rest < 2 * HALF + PASS_LEN)
        kept = tl.load(k_src + rest, mask=is_rest)
    pair = tl.arange(0, HALF_PAD)[None, None, :]
    is_pair = is_token & (pair < HALF)
    cos = tl.load(cos_ptr + token[:, None, None] * HALF + pair, mask=is_pair)
    sin = tl.load(sin_ptr + token[:, None, None] * HALF + pair, mask=is_pair)
    if IS_NEOX:
        x = tl.load(k_src + pair, mask=is_pair)
        y = tl.load(k_src + HALF + pair, mask=is_pair)
        x, y = _rotate(x, y, cos, sin, stays, MANTISSA, HAS_FP8)
        tl.store(k_dst + pair, x, mask=is_pair)
        tl.store(k_dst + HALF + pair, y, mask=is_pair)
    else:
        # Pairs are read and written as they lie, and split in registers: strided access would take a word per element.
        turned = tl.arange(0, 2 * HALF_PAD)[None, None, :]
        is_turned = is_token & (turned < 2 * HALF)
        xy = tl.load(k_src + turned, mask=is_turned)
        x, y = tl.split(tl.reshape(xy, [BLOCK_TOKENS, BLOCK_HEADS, HALF_PAD, 2]))
        x, y = _rotate(x, y, cos, sin, stays, MANTISSA, HAS_FP8)
        xy = tl.reshape(tl.join(x, y), [BLOCK_TOKENS, BLOCK_HEADS, 2 * HALF_PAD])
        tl.store(k_dst + turned, xy, mask=is_turned)
    if PASS_LEN > 0:
        tl.store(k_dst + rest, kept, mask=is_rest)
    tl.store(v_dst + dim, v, mask=is_dim)


# --- launching --------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What all layers of one launch have in common; their number of slots may differ."""

    dtype: torch.dtype
    num_heads: int
    k_dim: int
    v_dim: int
    strides: tuple[int, int, int, int]  # of slots and heads of K, then of V, in elements


def copy_rotate_triton(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    turn: Turn,
    spec: RotarySpec,
) -> None:
    """`copy_rotate` on CUDA without a host synchronisation; the last dimension of the buffers must be dense.

    One launch for each layout that occurs among the layers: one, in most models.
    """
    for name, buffers in (("k_buffers", k_buffers), ("v_buffers", v_buffers)):
        for layer, buffer in enumerate(buffers):
            check_dense(**{f"{name}[{layer}]": buffer})
    groups: dict[_Layout, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for k, v in zip(k_buffers, v_buffers, strict=True):
        layout = _Layout(k.dtype, k.shape[1], k.shape[2], v.shape[2], (*k.stride()[:2], *v.stride()[:2]))
        for buffers, buffer in zip(groups.setdefault(layout, ([], [])), (k, v), strict=True):
            buffers.append(buffer)
    launches = [(layout, *map(addresses, pair)) for layout, pair in groups.items()]
    tokens = (src_loc.contiguous(), dst_loc.contiguous(), turn.by.contiguous(), *turn.table(spec))
    for layout, k_table, v_table in launches:
        _launch(layout, k_table, v_table, tokens, spec)


def _launch(
    layout: _Layout, k_table: AddressTable, v_table: AddressTable, tokens: Sequence[torch.Tensor], spec: RotarySpec
) -> None:
    half, pass_len = spec.rotary_dim // 2, layout.k_dim - spec.rotary_dim
    half_pad, pass_pad, v_pad = (triton.next_power_of_2(max(n, 1)) for n in (half, pass_len, layout.v_dim))
    block_heads, block_tokens = _choose_block(layout.num_heads, max(2 * half_pad, v_pad))
    num_tokens = tokens[0].numel()
    num_head_blocks = layout.num_heads // block_heads
    # Heads are the fastest: programs that run together write neighbouring memory. CUDA allows any number of programs on
    # the first axis alone, 65,535 on the others.
    grid = (num_head_blocks * triton.cdiv(num_tokens, block_tokens), len(k_table.on_device))
    _copy_rotate_kernel[grid](
        k_table.on_device,
        v_table.on_device,
        *tokens,
        num_tokens,
        *layout.strides,
        DTYPE=ELEMENTS.get(layout.dtype, tl.uint8),
        **fp8_options(layout.dtype),
        IS_ALIGNED=k_table.are_aligned and v_table.are_aligned,
        HALF=half,
        PASS_LEN=pass_len,
        V_DIM=layout.v_dim,
        HALF_PAD=half_pad,
        PASS_PAD=pass_pad,
        V_PAD=v_pad,
        IS_NEOX=spec.is_neox,
        BLOCK_TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        NUM_HEAD_BLOCKS=num_head_blocks,
        num_warps=4,
    )


def _choose_block(num_heads: int, dim_pad: int) -> tuple[int, int]:
    """(BLOCK_HEADS, BLOCK_TOKENS), powers of two; the first divides the number of heads, so that no head is masked."""
    block_heads = min(num_heads & -num_heads, _MAX_BLOCK_HEADS)
    return block_heads, max(1, min(_TILE_LEN // (block_heads * dim_pad), _MAX_BLOCK_TOKENS))
