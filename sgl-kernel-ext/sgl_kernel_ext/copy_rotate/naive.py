"""copy_rotate in torch: the reference, and the CPU path of the product.

    copy_rotate_reference   plain code, one temporary of all tokens, float64 rotation: what tests compare with
    copy_rotate_torch       the same result, faster: cuts the tokens into blocks once, applies these to every layer

A block is a part of a *run* (slots consecutive on both sides and one delta: slices, no index, no temporary for fp32) or
of the tokens that are in no long run (gathered and scattered by index). Blocks are small enough to stay in the cache.
Cutting reads the slots on the host: on CUDA prefer the Triton path.

fp8 is copied as bytes, since torch has no index_copy_ of it on the CPU, and rotated in wider floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_kernel_ext.backend import raw, rounded
from sgl_kernel_ext.rotary import RotarySpec, rotate, rotation_table

# Measured on 2 cores (AMD EPYC, Zen 5), 4,096 tokens of 12 heads x 64 in fp32: slices of 16 tokens cost as much as an
# index, slices of 64 a third of it. Blocks of 256-1,024 tokens are equally good, larger ones leave the L2 cache.
# What counts is bytes: 7 runs of 32 tokens of 2 heads x 32 take 0.6 ms for six layers by index, 1.8 by slices.
_MIN_RUN_BYTES = 32 * 12 * 64 * 4
_BLOCK_LEN = 512


@dataclass(frozen=True)
class _Block:
    """Some tokens of one call: where they come from, where they go and how far their keys turn."""

    src: slice | torch.Tensor  # slots; both slices or both [m] int64
    dst: slice | torch.Tensor
    cos: torch.Tensor | None  # [m or 1, 1, rotary_dim/2] fp32; None: plain copy
    sin: torch.Tensor | None


def copy_rotate_reference(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor,
    spec: RotarySpec,
) -> None:
    """The definition of `copy_rotate`, in float64; same arguments."""
    angle = position_delta.double()[:, None] * spec.inv_freq.to(position_delta.device).double()
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    half = spec.rotary_dim // 2
    first = torch.arange(half, device=src_loc.device) * (1 if spec.is_neox else 2)
    second = first + (half if spec.is_neox else 1)
    moved = position_delta != 0
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        k, v = raw(k_buffer), raw(v_buffer)
        v[dst_loc] = v[src_loc]
        old = k[src_loc]
        new = old.clone()
        x, y = (old.view(k_buffer.dtype).double()[..., dims] for dims in (first, second))
        new[..., first] = raw(rounded(x * cos - y * sin, k_buffer.dtype))
        new[..., second] = raw(rounded(y * cos + x * sin, k_buffer.dtype))
        k[dst_loc] = torch.where(moved[:, None, None], new, old)


def copy_rotate_torch(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    src_loc: torch.Tensor,
    dst_loc: torch.Tensor,
    position_delta: torch.Tensor,
    spec: RotarySpec,
) -> None:
    """`copy_rotate` on any device; memory beside the buffers: one block, and at most one table row per token."""
    min_run_len = max(_MIN_RUN_BYTES // k_buffers[0][0].nbytes, 1)
    blocks = list(_cut(src_loc, dst_loc, position_delta, spec, min_run_len))
    for k_buffer, v_buffer in zip(k_buffers, v_buffers, strict=True):
        for block in blocks:
            _copy(raw(v_buffer), block)
            if block.cos is None:
                _copy(raw(k_buffer), block)
            else:
                _copy_rotated(k_buffer, block, spec)


# --- cutting ----------------------------------------------------------------------------------------------------------


def _cut(
    src_loc: torch.Tensor, dst_loc: torch.Tensor, position_delta: torch.Tensor, spec: RotarySpec, min_run_len: int
) -> Iterator[_Block]:
    num_tokens = src_loc.numel()
    if num_tokens < min_run_len:
        yield from _pieces(src_loc, dst_loc, position_delta, spec)
        return
    breaks = (src_loc.diff() != 1) | (dst_loc.diff() != 1) | (position_delta.diff() != 0)
    inner = (breaks.nonzero().flatten() + 1).cpu()
    starts = torch.cat((inner.new_zeros(1), inner))
    lens = torch.cat((inner, inner.new_tensor([num_tokens]))) - starts
    is_long = lens >= min_run_len
    long_starts = starts[is_long]
    firsts = long_starts.to(src_loc.device)
    yield from _runs(src_loc[firsts], dst_loc[firsts], lens[is_long].tolist(), position_delta[firsts], spec)
    scattered = (~is_long).repeat_interleave(lens).to(src_loc.device)
    if bool(scattered.any()):
        yield from _pieces(src_loc[scattered], dst_loc[scattered], position_delta[scattered], spec)


def _runs(
    src: torch.Tensor, dst: torch.Tensor, lens: list[int], delta: torch.Tensor, spec: RotarySpec
) -> Iterator[_Block]:
    cos, sin = rotation_table(spec, delta)
    deltas = delta.tolist()
    for i, (s, d, run_len) in enumerate(zip(src.tolist(), dst.tolist(), lens, strict=True)):
        table = (cos[i][None, None], sin[i][None, None]) if deltas[i] else (None, None)
        for a in range(0, run_len, _BLOCK_LEN):
            b = min(a + _BLOCK_LEN, run_len)
            yield _Block(slice(s + a, s + b), slice(d + a, d + b), *table)


def _pieces(src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor, spec: RotarySpec) -> Iterator[_Block]:
    still = delta == 0
    for s, d in zip(src[still].split(_BLOCK_LEN), dst[still].split(_BLOCK_LEN), strict=True):
        if s.numel():
            yield _Block(s, d, None, None)
    moved = ~still
    # Tokens of one chunk share their delta: cos and sin are computed once for each distinct value.
    distinct, row = delta[moved].unique(return_inverse=True)
    cos, sin = rotation_table(spec, distinct)
    parts = (src[moved].split(_BLOCK_LEN), dst[moved].split(_BLOCK_LEN), row.split(_BLOCK_LEN))
    for s, d, r in zip(*parts, strict=True):
        if s.numel():
            yield _Block(s, d, cos[r][:, None], sin[r][:, None])


# --- applying ---------------------------------------------------------------------------------------------------------


def _copy(buffer: torch.Tensor, block: _Block) -> None:
    if isinstance(block.src, slice):
        buffer[block.dst].copy_(buffer[block.src])
    else:
        buffer.index_copy_(0, block.dst, buffer.index_select(0, block.src))


def _copy_rotated(buffer: torch.Tensor, block: _Block, spec: RotarySpec) -> None:
    bits = raw(buffer)
    in_place = isinstance(block.src, slice)
    old = bits[block.src] if in_place else bits.index_select(0, block.src)
    if in_place and buffer.dtype == torch.float32:
        rotate(old, buffer[block.dst], block.cos, block.sin, spec)
        return
    turned = torch.empty(old.shape, dtype=torch.float32, device=old.device)
    rotate(old.view(buffer.dtype).float(), turned, block.cos, block.sin, spec)
    new = raw(rounded(turned, buffer.dtype))
    if spec.rotary_dim < old.shape[2]:
        new[..., spec.rotary_dim :] = old[..., spec.rotary_dim :]  # the bits of a NaN do not survive two conversions
    if in_place:
        bits[block.dst].copy_(new)
    else:
        bits.index_copy_(0, block.dst, new)
