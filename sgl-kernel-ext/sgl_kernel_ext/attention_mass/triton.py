"""attention_mass in Triton: two passes over the scores, neither of which is ever stored.

    lse pass        a program per tile of rows, query head and piece of keys finds the rows' log-sum-exp over the piece
      join          those of each segment's pieces are joined, and those of all pieces
    received pass   a program per block of keys and query head walks the rows that see it and adds up exp(s - lse)

Pieces are segments, the long ones cut: so few rows fill a GPU too, and no program walks a long segment alone. The mass
of a row on a segment is exp(lse of the segment - lse of the row): no small segment is lost beside a large one. Nothing
is added atomically, so equal calls give equal bits. A tile of rows goes up to the last key of the piece that one of
them sees, and a block of keys skips the tiles of rows that see none of it. Heads are averaged in torch at the end: only
`[num_q_heads, kv_len]` and `[1 + num_pieces + num_segments, num_q_heads, num_rows]` fp32 are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.transfer import upload
from sgl_kernel_ext.triton_parts import LOG2_E, add_in_log2, load_q, scales_of, score_options, scores_of

# Programs of the first pass, or down to half as many, if there are keys enough: four to two per sm_90 multiprocessor.
_MAX_PROGRAMS = 528
_MIN_PIECE_LEN = 256


# Neither counts nor the alignment of an index may compile a kernel again in the middle of serving.
@triton.jit(do_not_specialize=["positions_ptr", "cuts_ptr", "num_rows"])
def _lse_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Fills [1:1 + pieces] of lse, [1 + pieces + segments, heads, rows] in log2; -inf if a row sees nothing of a piece.

    cuts: [pieces + 1], where the pieces begin, then kv_len or more.
    """
    head = tl.program_id(1)
    piece = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    begin = tl.load(cuts_ptr + piece)
    end = tl.minimum(tl.load(cuts_ptr + piece + 1), tl.max(position, 0) + 1)
    dim = tl.arange(0, HEAD_PAD)
    q = load_q(q_ptr, row.to(tl.int64) * q_row_stride + head * q_head_stride, is_row, dim, HEAD_DIM, UPCAST)
    k_ptr += (head // GROUP) * k_head_stride

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        n = start + tl.arange(0, BLOCK_KEYS)
        is_key = n < end
        scores = scores_of(
            q,
            k_ptr,
            n.to(tl.int64) * k_stride,
            is_key,
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
        scores = tl.where(visible, scores, float("-inf"))
        top, total = add_in_log2(top, total, scores)
    at = ((1 + piece.to(tl.int64)) * tl.num_programs(1) + head) * num_rows + row
    tl.store(lse_ptr + at, top + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["firsts_ptr", "num_rows", "num_pieces"])
def _join_kernel(firsts_ptr, lse_ptr, num_rows, num_pieces, BLOCK_ROWS: tl.constexpr, BLOCK_PIECES: tl.constexpr):
    """Fills [0] of lse by joining all pieces, and [1 + pieces:] by joining each segment's; rows are those of all heads.

    firsts: [segments + 1], the first piece of each segment, then `num_pieces`.
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
        top, total = add_in_log2(top, total, tl.load(lse_ptr + at, mask=seen, other=float("-inf")))
    at = tl.cast(target, tl.int64) * num_rows + row
    tl.store(lse_ptr + at, top + tl.log2(total), mask=is_row)


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
        if last >= begin:
            q = load_q(q_ptr, row.to(tl.int64) * q_row_stride + head * q_head_stride, is_row, dim, HEAD_DIM, UPCAST)
            # What no row of the tile sees is not read: it may be anything.
            seen = is_key & (n <= last)
            scores = scores_of(
                q,
                k_ptr,
                n.to(tl.int64) * k_stride,
                seen,
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
            weights = tl.exp2(scores - lse[:, None])
            mass += tl.sum(tl.where(visible, weights, 0.0), 0)
    tl.store(received_ptr + head.to(tl.int64) * kv_len + n, mass, mask=is_key)


def attention_mass_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    starts: Sequence[int] | None,
    sinks: torch.Tensor | None,
    *,
    sm_scale: float,
    logit_cap: float,
    skip_self: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_mass` without a host synchronisation; the last dimension of q and k must be dense.

    Args:
        starts: where segments begin, as in `attention_mass`; None = no segments.
        sinks: `[num_q_heads]`, added to the log-sum-exp of the rows, never to that of a segment.
    """
    check_dense(q=q, k=k)
    (num_rows, num_heads, _), (kv_len, num_kv_heads, _) = q.shape, k.shape
    received = torch.empty(num_heads, kv_len, dtype=torch.float32, device=q.device)
    scales = scales_of(sm_scale, logit_cap)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    options = score_options(q, num_heads // num_kv_heads, k.dtype, logit_cap)
    num_tiles = triton.cdiv(num_rows, options["BLOCK_ROWS"])
    positions = row_positions.contiguous()
    piece_len = max(_MIN_PIECE_LEN, triton.next_power_of_2(kv_len * num_tiles * num_heads // _MAX_PROGRAMS))
    cuts, firsts = _cut(starts, kv_len, piece_len, q.device)
    num_pieces, num_segments = len(cuts) - 1, len(starts or ())
    lse = received.new_empty(1 + num_pieces + num_segments, num_heads, num_rows)
    _lse_kernel[(num_tiles, num_heads, num_pieces)](
        *(q, raw(k), positions, cuts, lse, num_rows, *scales),
        *strides,
        **options,
    )
    _join_kernel[(triton.cdiv(num_heads * num_rows, 32), 1 + num_segments)](
        *(firsts, lse, num_heads * num_rows, num_pieces), BLOCK_ROWS=32, BLOCK_PIECES=32, num_warps=4
    )
    row_lse = lse[0]
    if sinks is not None:
        row_lse = torch.logaddexp2(row_lse, (sinks.float() * LOG2_E)[:, None])
    _received_kernel[(triton.cdiv(kv_len, options["BLOCK_KEYS"]), num_heads)](
        *(q, raw(k), positions, row_lse, received, num_rows, kv_len, *scales),
        *strides,
        SKIP_SELF=skip_self,
        **options,
    )
    by_segment = None if starts is None else torch.exp2(lse[1 + num_pieces :] - row_lse).mean(1).t()
    return received.mean(0), by_segment


def _cut(starts: Sequence[int] | None, kv_len: int, piece_len: int, device: torch.device) -> list[torch.Tensor]:
    """`cuts` and `firsts` of the kernels, int64 on the device, by one launch: segments in pieces of `piece_len` keys.

    Without segments all keys are one segment, and what is returned for `firsts` must not be read.
    """
    if starts is None:
        return [torch.arange(0, kv_len + piece_len, piece_len, device=device)] * 2
    segments = [range(begin, end, piece_len) for begin, end in itertools.pairwise([*starts, kv_len])]
    cuts = np.array([*itertools.chain.from_iterable(segments), kv_len], dtype=np.int64)
    return upload([cuts, np.cumsum([0, *map(len, segments)], dtype=np.int64)], device)
