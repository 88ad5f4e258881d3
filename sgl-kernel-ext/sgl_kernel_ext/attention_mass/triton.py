"""attention_mass in Triton: two passes over the scores, neither of which is ever stored.

    lse pass        a program per tile of rows, query head and piece of keys finds the rows' log-sum-exp over the piece
      joined        those of each segment's pieces, and of all
    received pass   a program per block of keys and query head walks the rows that see it and adds up exp(s - lse)

Pieces are segments, long ones cut: few rows fill a GPU too, and no program walks a long segment alone. The mass of a
row on a segment is exp(lse of the segment - lse of the row): no small segment is lost beside a large one. Nothing is
added atomically, so equal calls give equal bits. A tile of rows goes from the first to the last key that one of them
sees, and a block of keys skips the tiles of rows that see none of it. Heads are averaged in torch at the end:
`[num_q_heads, kv_len]` and `[1 + num_pieces + num_segments, num_q_heads, num_rows]` fp32 are all that is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.transfer import upload
from sgl_kernel_ext.triton_parts import LOG2_E, dot_options, fp8_options, load_q, operand, tanh

# Programs of the first pass where there are keys enough, or down to half of it: four to two a multiprocessor of sm_90.
_MAX_PROGRAMS = 528
_MIN_PIECE_LEN = 256


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


@triton.jit
def _log_add(top, total, scores):
    """The running `total * 2**top` of each row, with 2**scores of [rows, any] added; nothing yet is 0 * 2**-inf."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is no number
    return new_top, total * tl.exp2(top - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)


# Neither counts nor the alignment of an index may compile a kernel again in the middle of serving.
@triton.jit(do_not_specialize=["positions_ptr", "firsts_ptr", "cuts_ptr", "num_rows"])
def _lse_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    firsts_ptr,
    cuts_ptr,
    lse_ptr,
    num_rows,
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
    HAS_FIRSTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Fills [1:1 + pieces] of lse, [1 + pieces + segments, heads, rows] in log2, -inf where a row sees nothing of it.

    cuts: [pieces + 1], where the pieces begin, and the last one kv_len or more.
    """
    head = tl.program_id(1)
    piece = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    begin = tl.load(cuts_ptr + piece)
    end = tl.minimum(tl.load(cuts_ptr + piece + 1), tl.max(position, 0) + 1)
    if HAS_FIRSTS:
        first = tl.load(firsts_ptr + row, mask=is_row, other=1 << 62)
        begin = tl.maximum(begin, tl.min(first, 0))
    dim = tl.arange(0, HEAD_PAD)
    q = load_q(q_ptr, row.to(tl.int64) * q_row_stride + head * q_head_stride, is_row, dim, HEAD_DIM, UPCAST)
    k_ptr += (head // GROUP) * k_head_stride

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
        visible = (n[None, :] <= position[:, None]) & is_key[None, :]
        if HAS_FIRSTS:
            visible = visible & (n[None, :] >= first[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        top, total = _log_add(top, total, scores)
    at = ((1 + piece.to(tl.int64)) * tl.num_programs(1) + head) * num_rows + row
    tl.store(lse_ptr + at, top + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["firsts_ptr", "num_rows", "num_pieces"])
def _join_kernel(firsts_ptr, lse_ptr, num_rows, num_pieces, BLOCK_ROWS: tl.constexpr, BLOCK_PIECES: tl.constexpr):
    """Fills [0] of lse, of all pieces, and [1 + pieces:], of those of each segment; rows are those of all heads.

    firsts: [segments + 1], the first piece of each segment, and `num_pieces`.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    begin, end, target = 0, num_pieces, 0
    if tl.program_id(1) > 0:
        begin = tl.load(firsts_ptr + tl.program_id(1) - 1).to(tl.int32)
        end = tl.load(firsts_ptr + tl.program_id(1)).to(tl.int32)
        target = num_pieces + tl.program_id(1)
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(begin, end, BLOCK_PIECES):
        piece = start + tl.arange(0, BLOCK_PIECES)
        at = (1 + piece.to(tl.int64))[None, :] * num_rows + row[:, None]
        seen = is_row[:, None] & (piece < end)[None, :]
        top, total = _log_add(top, total, tl.load(lse_ptr + at, mask=seen, other=float("-inf")))
    at = tl.cast(target, tl.int64) * num_rows + row
    tl.store(lse_ptr + at, top + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["positions_ptr", "firsts_ptr", "num_rows", "kv_len"])
def _received_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    firsts_ptr,
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
    HAS_FIRSTS: tl.constexpr,
    SKIP_SELF: tl.constexpr,
    SQUARED: tl.constexpr,
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
    begin = tl.program_id(0) * BLOCK_KEYS
    is_key = n < kv_len
    dim = tl.arange(0, HEAD_PAD)
    k_ptr += (head // GROUP) * k_head_stride
    mass = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(0, num_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        position = tl.load(positions_ptr + row, mask=is_row, other=-1)
        last = tl.max(position, 0)
        is_seen = last >= begin
        if HAS_FIRSTS:
            first = tl.load(firsts_ptr + row, mask=is_row, other=1 << 62)
            is_seen = is_seen & (tl.min(first, 0) < begin + BLOCK_KEYS)
        if is_seen:
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
            if HAS_FIRSTS:
                visible = visible & (n[None, :] >= first[:, None])
            if SKIP_SELF:
                visible = visible & (n[None, :] != position[:, None])
            weights = tl.exp2((2.0 if SQUARED else 1.0) * (scores - lse[:, None]))
            mass += tl.sum(tl.where(visible, weights, 0.0), 0)
    tl.store(received_ptr + head.to(tl.int64) * kv_len + n, mass, mask=is_key)


def attention_mass_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    starts: Sequence[int] | None,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    row_firsts: torch.Tensor | None,
    *,
    sm_scale: float,
    logit_cap: float,
    skip_self: bool,
    squared: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_mass` without a host synchronisation; the last dimension of q and k must be dense.

    Args:
        starts: where segments begin, as in `attention_mass`; None = no segments.
        lse: `[num_rows, num_q_heads]`; with it and without segments the first pass is left out.
        sinks: `[num_q_heads]`, added to the log-sum-exp of the rows, never to that of a segment.
        row_firsts: as in `attention_mass`.
    """
    check_dense(q=q, k=k)
    (num_rows, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
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
        "HAS_FIRSTS": row_firsts is not None,
        "BLOCK_ROWS": block_rows,
        "BLOCK_KEYS": block_keys,
        **dot_options(q),
        **fp8_options(k.dtype),
        "num_warps": 4,
    }
    positions = row_positions.contiguous()
    row_firsts = positions if row_firsts is None else row_firsts.contiguous()
    row_lse = None if lse is None else (lse.float() * math.log2(math.e)).t().contiguous()
    if lse is None or starts is not None:
        num_tiles = triton.cdiv(num_rows, block_rows)
        piece_len = max(_MIN_PIECE_LEN, triton.next_power_of_2(kv_len * num_tiles * num_heads // _MAX_PROGRAMS))
        cuts, firsts = _cut(starts, kv_len, piece_len, q.device)
        num_pieces, num_segments = len(cuts) - 1, len(starts or ())
        found = received.new_empty(1 + num_pieces + num_segments, num_heads, num_rows)
        _lse_kernel[(num_tiles, num_heads, num_pieces)](
            *(q, raw(k), positions, row_firsts, cuts, found, num_rows, *scales),
            *strides,
            **options,
        )
        _join_kernel[(triton.cdiv(num_heads * num_rows, 32), 1 + num_segments)](
            *(firsts, found, num_heads * num_rows, num_pieces), BLOCK_ROWS=32, BLOCK_PIECES=32, num_warps=4
        )
        row_lse = found[0] if row_lse is None else row_lse
    if sinks is not None:
        row_lse = torch.logaddexp2(row_lse, (sinks.float() * LOG2_E)[:, None])
    _received_kernel[(triton.cdiv(kv_len, block_keys), num_heads)](
        *(q, raw(k), positions, row_firsts, row_lse, received, num_rows, kv_len, *scales),
        *strides,
        SKIP_SELF=skip_self,
        SQUARED=squared,
        **options,
    )
    by_segment = None if starts is None else torch.exp2(found[1 + num_pieces :] - row_lse).mean(1).t()
    return received.mean(0), by_segment


def _cut(starts: Sequence[int] | None, kv_len: int, piece_len: int, device: torch.device) -> list[torch.Tensor]:
    """`cuts` and `firsts` of the kernels, int64 on the device, by one launch: segments in pieces of `piece_len` keys.

    Without segments all keys are one, and what stands in the place of `firsts` is not to be read.
    """
    if starts is None:
        return [torch.arange(0, kv_len + piece_len, piece_len, device=device)] * 2
    segments = [range(begin, end, piece_len) for begin, end in itertools.pairwise([*starts, kv_len])]
    cuts = np.array([*itertools.chain.from_iterable(segments), kv_len], dtype=np.int64)
    return upload([cuts, np.cumsum([0, *map(len, segments)], dtype=np.int64)], device)


def _choose_blocks(head_dim: int, element_size: int) -> tuple[int, int]:
    """(BLOCK_ROWS, BLOCK_KEYS): without spills, and the 64 rows that sm_90's matrix products want."""
    if element_size == 4:
        return 16, 32
    return 64, 64 if head_dim <= 128 else 32
