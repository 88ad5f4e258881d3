"""attention_mass in Triton: two passes over the scores, neither of which is ever stored.

    lse pass        a program per tile of rows and query head walks the segments and keeps the log-sum-exp of each
    received pass   a program per block of keys and query head walks the rows that see it and adds up exp(s - lse)

The mass of a row on a segment is exp(lse of the segment - lse of the row): both come from the first pass, and no small
segment is lost beside a large one. Nothing is added atomically, so equal calls give equal bits. A tile of rows stops at
the last key that one of them sees, and a block of keys skips the tiles of rows that lie in front of it. Heads are
averaged in torch at the end: `[num_q_heads, kv_len]` and `[num_rows, num_q_heads, num_segments]` fp32 are all that is
written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.triton_parts import LOG2_E, dot_options, fp8_options, load_q, operand, tanh


@triton.jit
def _scores(
    q, k_ptr, n, is_key, k_stride, dim, score_scale, logit_cap, HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """[BLOCK_ROWS, BLOCK_KEYS] fp32 in units of log2, not masked; n are keys, k_ptr begins with the head's first."""
    k_at = n.to(tl.int64)[None, :] * k_stride + dim[:, None]
    k = tl.load(k_ptr + k_at, mask=is_key[None, :] & (dim < HEAD_DIM)[:, None], other=0)
    scores = tl.dot(q, operand(k, q, MANTISSA, HAS_FP8), input_precision=PRECISION) * score_scale
    return logit_cap * tanh(scores) if HAS_CAP else scores


# Neither counts nor the alignment of an index may compile the kernel again in the middle of serving.
@triton.jit(do_not_specialize=["positions_ptr", "starts_ptr", "num_rows", "num_segments"])
def _lse_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    starts_ptr,
    lse_ptr,
    segment_lse_ptr,
    num_rows,
    num_segments,
    score_scale,
    logit_cap,
    q_row_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """starts: [num_segments + 1], the last one kv_len. lse [heads, rows], segment_lse [heads, rows, segments], log2."""
    head = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    dim = tl.arange(0, HEAD_PAD)
    q = load_q(q_ptr, row.to(tl.int64) * q_row_stride + head * q_head_stride, is_row, dim, HEAD_DIM, UPCAST)
    k_ptr += (head // GROUP) * k_head_stride
    last = tl.max(position, 0)

    all_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_ROWS], tl.float32)
    for segment in range(num_segments):
        begin = tl.load(starts_ptr + segment)
        end = tl.minimum(tl.load(starts_ptr + segment + 1), last + 1)
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        for start in range(begin, end, BLOCK_KEYS):
            n = start + tl.arange(0, BLOCK_KEYS)
            is_key = n < end
            scores = _scores(
                q,
                k_ptr,
                n,
                is_key,
                k_stride,
                dim,
                score_scale,
                logit_cap,
                HEAD_DIM,
                HAS_CAP,
                PRECISION,
                MANTISSA,
                HAS_FP8,
            )
            scores = tl.where((n[None, :] <= position[:, None]) & is_key[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet has a top of -inf, and -inf - -inf is no number.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
            top = new_top
        at = (head.to(tl.int64) * num_rows + row) * num_segments + segment
        tl.store(segment_lse_ptr + at, top + tl.log2(total), mask=is_row)  # -inf where the row sees nothing of it
        new_top = tl.maximum(all_top, top)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        all_total = all_total * tl.exp2(all_top - shift) + total * tl.exp2(top - shift)
        all_top = new_top
    # Key 0 is visible to every row, so the total is above 0.
    tl.store(lse_ptr + head.to(tl.int64) * num_rows + row, all_top + tl.log2(all_total), mask=is_row)


@triton.jit(do_not_specialize=["positions_ptr", "num_rows", "kv_len"])
def _received_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    lse_ptr,
    received_ptr,
    num_rows,
    kv_len,
    score_scale,
    logit_cap,
    q_row_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SKIP_SELF: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """received: [heads, kv_len]."""
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    first = tl.program_id(0) * BLOCK_KEYS
    is_key = n < kv_len
    dim = tl.arange(0, HEAD_PAD)
    k_ptr += (head // GROUP) * k_head_stride
    mass = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(0, num_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        position = tl.load(positions_ptr + row, mask=is_row, other=-1)
        last = tl.max(position, 0)
        if last >= first:
            q = load_q(q_ptr, row.to(tl.int64) * q_row_stride + head * q_head_stride, is_row, dim, HEAD_DIM, UPCAST)
            # What no row of the tile sees is not read: it may be anything.
            seen = is_key & (n <= last)
            scores = _scores(
                q,
                k_ptr,
                n,
                seen,
                k_stride,
                dim,
                score_scale,
                logit_cap,
                HEAD_DIM,
                HAS_CAP,
                PRECISION,
                MANTISSA,
                HAS_FP8,
            )
            lse = tl.load(lse_ptr + head.to(tl.int64) * num_rows + row, mask=is_row, other=0.0)
            visible = (n[None, :] <= position[:, None]) & seen[None, :]
            if SKIP_SELF:
                visible = visible & (n[None, :] != position[:, None])
            mass += tl.sum(tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0), 0)
    tl.store(received_ptr + head.to(tl.int64) * kv_len + n, mass, mask=is_key)


def attention_mass_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    starts: torch.Tensor | None,
    lse: torch.Tensor | None,
    *,
    sm_scale: float,
    logit_cap: float,
    skip_self: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_mass` without a host synchronisation; the last dimension of q and k must be dense.

    Args:
        starts: int64 on the device, the starts of the segments and kv_len behind them; None = no segments.
        lse: `[num_rows, num_q_heads]`; with it and without segments the first pass is left out.
    """
    check_dense(q=q, k=k)
    (num_rows, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
    bounds = torch.arange(0, 2 * kv_len, kv_len, device=q.device) if starts is None else starts
    num_segments = len(bounds) - 1
    own_lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q.device)
    # Of one segment that is all keys they are the same numbers.
    segment_lse = own_lse if starts is None else own_lse.new_empty(num_heads, num_rows, num_segments)
    received = torch.empty(num_heads, kv_len, dtype=torch.float32, device=q.device)
    # A cap stands between two scales: cap * tanh(score / cap).
    scales = (sm_scale / logit_cap if logit_cap > 0 else sm_scale * LOG2_E, logit_cap * LOG2_E)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    block_rows, block_keys = _choose_blocks(head_dim, q.element_size())
    options = {
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(triton.next_power_of_2(head_dim), 16),
        "HAS_CAP": logit_cap > 0,
        "BLOCK_ROWS": block_rows,
        "BLOCK_KEYS": block_keys,
        **dot_options(q),
        **fp8_options(k.dtype),
        "num_warps": 4,
    }
    positions = row_positions.contiguous()
    if lse is None or starts is not None:
        _lse_kernel[(triton.cdiv(num_rows, block_rows), num_heads)](
            *(q, raw(k), positions, bounds, own_lse, segment_lse, num_rows, num_segments, *scales),
            *strides,
            **options,
        )
    row_lse = own_lse if lse is None else (lse.float() * math.log2(math.e)).t().contiguous()
    _received_kernel[(triton.cdiv(kv_len, block_keys), num_heads)](
        *(q, raw(k), positions, row_lse, received, num_rows, kv_len, *scales),
        *strides,
        SKIP_SELF=skip_self,
        **options,
    )
    by_segment = None if starts is None else torch.exp2(segment_lse - row_lse[:, :, None]).mean(0)
    return received.mean(0), by_segment


def _choose_blocks(head_dim: int, element_size: int) -> tuple[int, int]:
    """(BLOCK_ROWS, BLOCK_KEYS): without spills, and the 64 rows that sm_90's matrix products want."""
    if element_size == 4:
        return 16, 32
    return 64, 64 if head_dim <= 128 else 32
