"""add_drift in Triton: two launches sum up what the rows of each chunk changed, one adds it to the tokens.

    sums   a program per chunk and head walks the chunk's rows, turns their change back and adds it up
    totals a program per chunk and head adds up the sums of the chunk's request
    add    a program per block of tokens and head turns the mean of each token's chunk to its position and adds it

Nothing is added atomically, and nothing of one request reaches another. Limited by memory: K and V of the tokens are
read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.add_drift.drift import Drift
from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.rotary import RotarySpec
from sgl_kernel_ext.triton_parts import fp8_of_fp32, fp8_options, load_fp32, pairs

# Elements of K or V that a program holds at one time, at 128 threads 16 each. Not tuned on a GPU yet.
_TILE_LEN = 2048


@triton.jit
def _change(new_ptr, old_ptr, new_at, old_at, mask, scale, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    new = tl.load(new_ptr + new_at, mask=mask, other=0).to(tl.float32)
    return new - load_fp32(old_ptr, old_at, mask, MANTISSA, HAS_FP8) * scale


@triton.jit
def _increase(ptr, at, mask, change, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    if MANTISSA > 0:
        new = load_fp32(ptr, at, mask, MANTISSA, HAS_FP8) + change
        tl.store(ptr + at, fp8_of_fp32(new, MANTISSA, HAS_FP8), mask=mask)
    else:
        old = tl.load(ptr + at, mask=mask, other=0)
        tl.store(ptr + at, (old.to(tl.float32) + change).to(old.dtype), mask=mask)


# Neither counts nor the alignment of an index may compile the kernels again in the middle of serving.
@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr", "bounds_ptr"])
def _drift_sums_kernel(
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    slots_ptr,
    bounds_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,
    k_scale,
    v_scale,
    k_new_stride,
    k_new_head_stride,
    v_new_stride,
    v_new_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_LEN: tl.constexpr,
    PASS_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """sums: [chunks, heads, K then V] fp32, with K at position 0."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(bounds_ptr + chunk), tl.load(bounds_ptr + chunk + 1)
    pair, rest, dim = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, PASS_PAD)[None, :], tl.arange(0, V_PAD)[None, :]
    first, second = pairs(pair, HALF, IS_NEOX)
    sum_x, sum_y = tl.zeros([HALF_PAD], tl.float32), tl.zeros([HALF_PAD], tl.float32)
    sum_rest, sum_v = tl.zeros([PASS_PAD], tl.float32), tl.zeros([V_PAD], tl.float32)
    k_new_ptr += head * k_new_head_stride
    v_new_ptr += head * v_new_head_stride
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_row = at < end
        # int64: slot * stride passes 2**31 in a large pool.
        row = tl.load(rows_ptr + at, mask=is_row, other=0).to(tl.int64)[:, None]
        slot = tl.load(slots_ptr + at, mask=is_row, other=0).to(tl.int64)[:, None]
        k_new_at, k_at = row * k_new_stride, slot * k_stride
        is_row = is_row[:, None]
        if HALF > 0:
            mask = is_row & (pair < HALF)
            cos = tl.load(cos_ptr + at[:, None] * HALF + pair, mask=mask, other=0.0)
            sin = tl.load(sin_ptr + at[:, None] * HALF + pair, mask=mask, other=0.0)
            x = _change(k_new_ptr, k_ptr, k_new_at + first, k_at + first, mask, k_scale, MANTISSA, HAS_FP8)
            y = _change(k_new_ptr, k_ptr, k_new_at + second, k_at + second, mask, k_scale, MANTISSA, HAS_FP8)
            sum_x += tl.sum(x * cos - y * sin, 0)
            sum_y += tl.sum(y * cos + x * sin, 0)
        if PASS_LEN > 0:
            mask = is_row & (rest < PASS_LEN)
            kept = 2 * HALF + rest
            change = _change(k_new_ptr, k_ptr, k_new_at + kept, k_at + kept, mask, k_scale, MANTISSA, HAS_FP8)
            sum_rest += tl.sum(change, 0)
        mask = is_row & (dim < V_DIM)
        v_new_at, v_at = row * v_new_stride + dim, slot * v_stride + dim
        sum_v += tl.sum(_change(v_new_ptr, v_ptr, v_new_at, v_at, mask, v_scale, MANTISSA, HAS_FP8), 0)
    sums_ptr += (chunk * tl.num_programs(1) + head) * (2 * HALF + PASS_LEN + V_DIM)
    if HALF > 0:
        pair = tl.arange(0, HALF_PAD)
        tl.store(sums_ptr + pair, sum_x, mask=pair < HALF)
        tl.store(sums_ptr + HALF + pair, sum_y, mask=pair < HALF)
    if PASS_LEN > 0:
        rest = tl.arange(0, PASS_PAD)
        tl.store(sums_ptr + 2 * HALF + rest, sum_rest, mask=rest < PASS_LEN)
    dim = tl.arange(0, V_PAD)
    tl.store(sums_ptr + 2 * HALF + PASS_LEN + dim, sum_v, mask=dim < V_DIM)


@triton.jit(do_not_specialize=["peers_ptr", "num_chunks"])
def _totals_kernel(peers_ptr, sums_ptr, totals_ptr, num_chunks, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """totals: shaped as sums; each entry is the sum of `sums` over the chunks of the chunk's request."""
    chunk, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, end = tl.load(peers_ptr + chunk), tl.load(peers_ptr + num_chunks + chunk)
    dim = tl.arange(0, WIDTH_PAD)
    total = tl.zeros([WIDTH_PAD], tl.float32)
    for one in range(first, end):
        total += tl.load(sums_ptr + (one * num_heads + head) * WIDTH + dim, mask=dim < WIDTH, other=0.0)
    tl.store(totals_ptr + (chunk * num_heads + head) * WIDTH + dim, total, mask=dim < WIDTH)


@triton.jit
def _mean(sums_ptr, totals_ptr, at, dim, mask, weight, share):
    """strength x d_c of each token; `share` is prior / number of rows of its request."""
    own = tl.load(sums_ptr + at + dim, mask=mask, other=0.0)
    return (own + share * tl.load(totals_ptr + at + dim, mask=mask, other=0.0)) * weight


@triton.jit(do_not_specialize=["slots_ptr", "chunk_ptr", "bounds_ptr", "peers_ptr", "num_tokens", "num_chunks"])
def _add_drift_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    chunk_ptr,
    bounds_ptr,
    peers_ptr,
    cos_ptr,
    sin_ptr,
    sums_ptr,
    totals_ptr,
    num_tokens,
    num_chunks,
    strength,
    prior,
    k_scale,
    v_scale,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASS_LEN: tl.constexpr,
    PASS_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """totals: of `_totals_kernel`."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = at < num_tokens
    slot = tl.load(slots_ptr + at, mask=is_token, other=0).to(tl.int64)[:, None]
    chunk = tl.load(chunk_ptr + at, mask=is_token, other=0)
    num_rows = tl.load(bounds_ptr + chunk + 1) - tl.load(bounds_ptr + chunk)
    weight = (strength / (num_rows.to(tl.float32) + prior))[:, None]
    first, end = tl.load(peers_ptr + chunk), tl.load(peers_ptr + num_chunks + chunk)
    share = (prior / (tl.load(bounds_ptr + end) - tl.load(bounds_ptr + first)).to(tl.float32))[:, None]
    width: tl.constexpr = 2 * HALF + PASS_LEN + V_DIM
    sums_at = ((chunk * num_heads + head) * width)[:, None]
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    token, is_token = at[:, None], is_token[:, None]
    if HALF > 0:
        pair = tl.arange(0, HALF_PAD)[None, :]
        mask = is_token & (pair < HALF)
        first, second = pairs(pair, HALF, IS_NEOX)
        cos = tl.load(cos_ptr + token * HALF + pair, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + token * HALF + pair, mask=mask, other=0.0)
        x = _mean(sums_ptr, totals_ptr, sums_at, pair, mask, weight, share)
        y = _mean(sums_ptr, totals_ptr, sums_at, HALF + pair, mask, weight, share)
        turned_x, turned_y = (x * cos - y * sin) / k_scale, (y * cos + x * sin) / k_scale
        _increase(k_ptr, slot * k_stride + first, mask, turned_x, MANTISSA, HAS_FP8)
        _increase(k_ptr, slot * k_stride + second, mask, turned_y, MANTISSA, HAS_FP8)
    if PASS_LEN > 0:
        rest = tl.arange(0, PASS_PAD)[None, :]
        mask = is_token & (rest < PASS_LEN)
        mean = _mean(sums_ptr, totals_ptr, sums_at, 2 * HALF + rest, mask, weight, share)
        _increase(k_ptr, slot * k_stride + 2 * HALF + rest, mask, mean / k_scale, MANTISSA, HAS_FP8)
    dim = tl.arange(0, V_PAD)[None, :]
    mask = is_token & (dim < V_DIM)
    mean = _mean(sums_ptr, totals_ptr, sums_at, 2 * HALF + PASS_LEN + dim, mask, weight, share)
    _increase(v_ptr, slot * v_stride + dim, mask, mean / v_scale, MANTISSA, HAS_FP8)


def add_drift_triton(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    drift: Drift,
    spec: RotarySpec | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`add_drift` without a host synchronisation; the last dimension of all four must be dense."""
    check_dense(k_new=k_new, v_new=v_new, k_buffer=k_buffer, v_buffer=v_buffer)
    (_, num_heads, head_dim), v_dim = k_new.shape, v_new.shape[2]
    num_tokens, num_chunks = len(drift.slots), len(drift.row_bounds) - 1
    half = 0 if spec is None else spec.rotary_dim // 2
    pads = [triton.next_power_of_2(max(n, 1)) for n in (half, head_dim - 2 * half, v_dim)]
    options = {
        "HALF": half,
        "HALF_PAD": pads[0],
        "PASS_LEN": head_dim - 2 * half,
        "PASS_PAD": pads[1],
        "V_DIM": v_dim,
        "V_PAD": pads[2],
        "IS_NEOX": spec is None or spec.is_neox,
        "BLOCK": max(1, _TILE_LEN // max(pads)),
        **fp8_options(k_buffer.dtype),
        "num_warps": 4,
    }
    width, peers = head_dim + v_dim, drift.peers.contiguous()
    sums, totals = torch.empty(2, num_chunks, num_heads, width, dtype=torch.float32, device=k_new.device)
    none = (sums, sums)  # stands for tables that are not read
    k, v = raw(k_buffer), raw(v_buffer)
    strides = (*k.stride()[:2], *v.stride()[:2])
    _drift_sums_kernel[(num_chunks, num_heads)](
        *(k_new, v_new, k, v, drift.rows.contiguous(), drift.row_slots.contiguous(), drift.row_bounds),
        *(none if spec is None else drift.back.table(spec)),
        *(sums, float(k_scale), float(v_scale)),
        *(*k_new.stride()[:2], *v_new.stride()[:2], *strides),
        **options,
    )
    pad = triton.next_power_of_2(width)
    _totals_kernel[(num_chunks, num_heads)](peers, sums, totals, num_chunks, WIDTH=width, WIDTH_PAD=pad, num_warps=4)
    _add_drift_kernel[(triton.cdiv(num_tokens, options["BLOCK"]), num_heads)](
        *(k, v, drift.slots.contiguous(), drift.chunk.contiguous(), drift.row_bounds, peers),
        *(none if spec is None else drift.there.table(spec)),
        *(sums, totals, num_tokens, num_chunks),
        *(float(drift.strength), float(drift.prior), float(k_scale), float(v_scale)),
        *strides,
        **options,
    )
