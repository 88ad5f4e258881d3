"""question_mass in Triton: three launches, however many layers, requests and heads there are.

    lse pass        a program per tile of rows, piece of keys, key head and layer finds the rows' log-sum-exp over it
    received pass   a program per block of keys and layer joins the pieces of every row, and adds up exp(s - lse)
    sum             a program per block of keys adds up the layers, one after the other

A row of a tile is a row of the question at one of the query heads that share a key head, so K is read once for all of
them. Tables of addresses and slots say where K lies. A request's masses are bit for bit the same in every batch: its
pieces, tiles and blocks begin where the request does, its number of pieces depends on no other request, and nothing is
added atomically. The first pass writes fp32 `[num_layers, num_kv_heads, num_pieces, num_rows * group]`, the second fp32
`[num_layers, sum of kv_lens]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense
from sgl_kernel_ext.question_mass import Questions
from sgl_kernel_ext.triton_parts import (
    ELEMENTS,
    LOG2_E,
    add_in_log2,
    addresses,
    constants,
    load_q,
    pointer_at,
    scales_of,
    score_options,
    scores_of,
)

# A request's keys are cut into pieces of this many, but into at most so many pieces, as each program of the received
# pass joins them all.
_MIN_PIECE_LEN = 256
_MAX_PIECES = 16
# Keys of a program of the other passes. The received pass spills with more; it mostly has one tile of rows, so there is
# nothing to load ahead.
_RECEIVED_KEYS = 32
_SUM_KEYS = 128


@triton.jit
def _request(table_ptr, request):
    """First row, number of rows, position of the first row, first key, number of keys: see `Questions.on_device`."""
    at = table_ptr + request * 5
    first_row = tl.load(at).to(tl.int32)
    num_rows = tl.load(at + 1).to(tl.int32)
    start = tl.load(at + 2).to(tl.int32)
    first_key = tl.load(at + 3)
    num_keys = tl.load(at + 4).to(tl.int32)
    return first_row, num_rows, start, first_key, num_keys


@triton.jit
def _piece_len(num_seen, MIN_PIECE_LEN: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Keys of a piece: whole blocks of 64."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, MAX_PIECES), 64) * 64, MIN_PIECE_LEN)


# Neither counts nor the alignment of an index may compile a kernel again in the middle of serving.
@triton.jit(
    do_not_specialize=["k_ptrs", "scales_ptr", "slots_ptr", "table_ptr", "num_rows", "num_pieces"],
)
def _question_lse_kernel(
    q_ptr,
    k_ptrs,
    scales_ptr,
    slots_ptr,
    table_ptr,
    lse_ptr,
    num_rows,
    num_pieces,
    logit_cap,
    k_stride,
    k_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    MIN_PIECE_LEN: tl.constexpr,
    MAX_PIECES: tl.constexpr,
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
    """Fills lse, [layers, key heads, pieces, all rows * GROUP] in log2; -inf if a row sees nothing of a piece."""
    layer_head = tl.program_id(1)
    layer = layer_head // NUM_KV_HEADS
    head = layer_head % NUM_KV_HEADS
    piece = tl.program_id(2) % num_pieces
    first_row, own_rows, start, first_key, _ = _request(table_ptr, tl.program_id(2) // num_pieces)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < own_rows * GROUP
    position = tl.where(is_row, start + row // GROUP, -1)
    piece_len = _piece_len(start + own_rows, MIN_PIECE_LEN, MAX_PIECES)
    begin = piece * piece_len
    end = tl.minimum(begin + piece_len, tl.max(position, 0) + 1)

    dim = tl.arange(0, HEAD_PAD)
    q_ptr += layer.to(tl.int64) * num_rows * NUM_KV_HEADS * GROUP * HEAD_DIM
    q_row = (first_row + row // GROUP) * NUM_KV_HEADS + head
    q = load_q(q_ptr, (q_row * GROUP + row % GROUP) * HEAD_DIM, is_row, dim, HEAD_DIM, UPCAST)
    k_ptr = pointer_at(k_ptrs, layer, DTYPE, IS_ALIGNED)
    k_ptr += head * k_head_stride
    score_scale = tl.load(scales_ptr + layer)

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for block in range(begin, end, BLOCK_KEYS):
        n = block + tl.arange(0, BLOCK_KEYS)
        is_key = n < end
        slot = tl.load(slots_ptr + first_key + n, mask=is_key, other=0)
        scores = scores_of(
            q,
            k_ptr,
            slot * k_stride,
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
        top, total = add_in_log2(top, total, tl.where(visible, scores, float("-inf")))
    lse_ptr += (layer_head.to(tl.int64) * num_pieces + piece) * num_rows * GROUP
    tl.store(lse_ptr + first_row * GROUP + row, top + tl.log2(total), mask=is_row)


@triton.jit(
    do_not_specialize=[
        *("k_ptrs", "scales_ptr", "slots_ptr", "table_ptr", "sinks_ptr"),
        *("num_rows", "num_pieces", "num_keys_of_all"),
    ],
)
def _question_received_kernel(
    q_ptr,
    k_ptrs,
    scales_ptr,
    slots_ptr,
    table_ptr,
    sinks_ptr,
    lse_ptr,
    received_ptr,
    num_rows,
    num_pieces,
    num_keys_of_all,
    logit_cap,
    k_stride,
    k_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    MIN_PIECE_LEN: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SQUARED: tl.constexpr,
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
    """received: [layers, all keys], means over heads; sinks: [layers, heads] fp32 in log2."""
    layer = tl.program_id(1)
    first_row, own_rows, start, first_key, num_keys = _request(table_ptr, tl.program_id(2))
    num_seen = start + own_rows
    begin = tl.program_id(0) * BLOCK_KEYS
    n = begin + tl.arange(0, BLOCK_KEYS)
    # Keys that no row sees are not read: they may be anything.
    is_seen = n < num_seen
    slot = tl.load(slots_ptr + first_key + n, mask=is_seen, other=0)
    dim = tl.arange(0, HEAD_PAD)
    k_ptr = pointer_at(k_ptrs, layer, DTYPE, IS_ALIGNED)
    score_scale = tl.load(scales_ptr + layer)
    q_ptr += layer.to(tl.int64) * num_rows * NUM_KV_HEADS * GROUP * HEAD_DIM
    own_pieces = tl.cdiv(num_seen, _piece_len(num_seen, MIN_PIECE_LEN, MAX_PIECES))
    piece = tl.arange(0, MAX_PIECES)
    # Rows in front of the block see none of its keys.
    first_tile = tl.maximum(begin - start, 0) * GROUP // BLOCK_ROWS * BLOCK_ROWS
    end_tile = tl.where(begin < num_seen, own_rows * GROUP, 0)
    mass = tl.zeros([BLOCK_KEYS], tl.float32)
    for head in range(NUM_KV_HEADS):
        for tile in range(first_tile, end_tile, BLOCK_ROWS):
            row = tile + tl.arange(0, BLOCK_ROWS)
            is_row = row < own_rows * GROUP
            own_lse = lse_ptr + (layer.to(tl.int64) * NUM_KV_HEADS + head) * num_pieces * num_rows * GROUP
            at = (piece[None, :] * num_rows + first_row) * GROUP + row[:, None]
            is_part = is_row[:, None] & (piece < own_pieces)[None, :]
            parts = tl.load(own_lse + at, mask=is_part, other=float("-inf"))
            if HAS_SINKS:
                sink_at = (layer * NUM_KV_HEADS + head) * GROUP + row % GROUP
                sink = tl.load(sinks_ptr + sink_at, mask=is_row, other=0.0)
                top = tl.maximum(tl.max(parts, 1), sink)
                lse = top + tl.log2(tl.sum(tl.exp2(parts - top[:, None]), 1) + tl.exp2(sink - top))
            else:
                top = tl.where(is_row, tl.max(parts, 1), 0.0)  # -inf - -inf is no number
                lse = top + tl.log2(tl.sum(tl.exp2(parts - top[:, None]), 1))
            q_row = (first_row + row // GROUP) * NUM_KV_HEADS + head
            q = load_q(q_ptr, (q_row * GROUP + row % GROUP) * HEAD_DIM, is_row, dim, HEAD_DIM, UPCAST)
            scores = scores_of(
                q,
                k_ptr + head * k_head_stride,
                slot * k_stride,
                is_seen,
                dim,
                score_scale,
                logit_cap,
                HEAD_DIM,
                HAS_CAP,
                PRECISION,
                MANTISSA,
                HAS_FP8,
            )
            visible = (n[None, :] <= (start + row // GROUP)[:, None]) & is_seen[None, :] & is_row[:, None]
            weights = tl.exp2((2.0 if SQUARED else 1.0) * (scores - lse[:, None]))
            mass += tl.sum(tl.where(visible, weights, 0.0), 0)
    at = layer.to(tl.int64) * num_keys_of_all + first_key + n
    tl.store(received_ptr + at, mass / (NUM_KV_HEADS * GROUP), mask=n < num_keys)


@triton.jit(do_not_specialize=["added_to_ptr", "num_layers", "num_keys", "has_before"])
def _sum_layers_kernel(received_ptr, added_to_ptr, sum_ptr, num_layers, num_keys, has_before, BLOCK_KEYS: tl.constexpr):
    """sum: [num_keys], of added_to, if there is one, then of received [num_layers, num_keys], in this order."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    is_key = n < num_keys
    total = tl.load(added_to_ptr + n, mask=is_key & (has_before > 0), other=0.0)
    for layer in range(num_layers):
        total += tl.load(received_ptr + layer * num_keys + n, mask=is_key, other=0.0)
    tl.store(sum_ptr + n, total, mask=is_key)


def question_mass_triton(
    q: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    questions: Questions,
    *,
    sm_scales: Sequence[float],
    logit_cap: float,
    squared: bool,
    sinks: Sequence[torch.Tensor] | None,
    added_to: torch.Tensor | None,
) -> torch.Tensor:
    """`question_mass` without a host synchronisation; the last dimension of the buffers must be dense.

    Args:
        sm_scales: of each layer, multiplied by the scale of its K.
    """
    first = k_buffers[0]
    check_dense(**{"k_buffers[0]": first})
    (num_layers, num_rows, num_heads, _), num_kv_heads = q.shape, first.shape[1]
    group, num_keys = num_heads // num_kv_heads, len(questions.kv_slots)
    options = score_options(q, group, first.dtype, logit_cap)
    keys = addresses(k_buffers)
    scales = constants(tuple(scales_of(one, logit_cap)[0] for one in sm_scales), np.float32, q.device)
    cap = scales_of(1.0, logit_cap)[1]
    own_sinks = scales if sinks is None else torch.stack(list(sinks)).float() * LOG2_E
    table = questions.on_device[1]
    most_pieces = max(_num_pieces(start + n) for start, n in zip(questions.starts, questions.row_lens, strict=True))
    most_tiles = triton.cdiv(max(questions.row_lens) * group, options["BLOCK_ROWS"])
    most_blocks = triton.cdiv(max(questions.kv_lens), _RECEIVED_KEYS)
    num_requests = len(questions.row_lens)
    lse = torch.empty(num_layers, num_kv_heads, most_pieces, num_rows * group, dtype=torch.float32, device=q.device)
    received = lse.new_empty(num_layers, num_keys)
    where = q, keys.on_device, scales, questions.kv_slots, table
    options |= {
        "NUM_KV_HEADS": num_kv_heads,
        "DTYPE": ELEMENTS.get(first.dtype, tl.uint8),
        "IS_ALIGNED": keys.are_aligned,
        "MIN_PIECE_LEN": _MIN_PIECE_LEN,
        "MAX_PIECES": _MAX_PIECES,
    }
    # Tiles are the fastest axis: programs that run together read the same keys.
    _question_lse_kernel[(most_tiles, num_layers * num_kv_heads, num_requests * most_pieces)](
        *(*where, lse, num_rows, most_pieces, cap, first.stride(0), first.stride(1)), **options
    )
    _question_received_kernel[(most_blocks, num_layers, num_requests)](
        *(*where, own_sinks, lse, received, num_rows, most_pieces, num_keys, cap, first.stride(0), first.stride(1)),
        HAS_SINKS=sinks is not None,
        SQUARED=squared,
        **(options | {"BLOCK_KEYS": _RECEIVED_KEYS, "num_stages": 1}),
    )
    total = lse.new_empty(num_keys)
    _sum_layers_kernel[(triton.cdiv(num_keys, _SUM_KEYS),)](
        *(received, total if added_to is None else added_to, total, num_layers, num_keys, int(added_to is not None)),
        BLOCK_KEYS=_SUM_KEYS,
        num_warps=4,
    )
    return total


def _num_pieces(num_seen: int) -> int:
    """Number of pieces into which `_piece_len` cuts so many keys."""
    piece_len = max(-(-num_seen // _MAX_PIECES // 64) * 64, _MIN_PIECE_LEN)
    return -(-num_seen // piece_len)
