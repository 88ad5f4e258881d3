"""sparse_extend in Triton: flash attention whose tiles stop at their last row's position.

A program computes one tile of rows for one key-value head: each query head that shares this head has rows in the tile,
so K and V are read once for all of them and a handful of rows still fills a matrix product. Row m of a tile is
query row m // GROUP, member m % GROUP. Which request a tile belongs to is found on the device from `row_indptr`, so
that nothing waits for the GPU; the grid has room for the worst case and tiles past the end leave at once. Tiles of
late positions are the longest and start first.

    keys of a tile   0 ... first row's position | ... last row's position
                     every row sees all: no mask | masked

If the tiles are too few to fill the GPU, the keys of each are split among several programs (split-K): every program
writes its share's result and log-sum-exp, and a second kernel weighs the shares.

The first kernel has two compile keys (with and without a split), the second one, whatever the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense, raw
from sgl_kernel_ext.sparse_extend.tiling import MAX_SPLITS, Tile, choose_splits, choose_tile, find_tile
from sgl_kernel_ext.triton_parts import LOG2_E, dot_options, fp8_options, gpu_arch, load_q, operand, tanh

# Below any score, yet finite.
LOWEST = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_ptr,
    v_ptr,
    slots_ptr,
    begin,
    end,
    position,
    window,
    score_scale,
    logit_cap,
    k_slot_stride,
    v_slot_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Adds keys [begin, end) to the running sums; pointers are those of the head and of the request's first slot.

    `top` and the scores are in units of log2. Without `IS_MASKED` every row must see all keys, and the keys must be
    whole blocks.
    """
    dim = tl.arange(0, HEAD_PAD)
    v_dim = tl.arange(0, V_PAD)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        # Slots fit 32 bits; a slot times a stride does not in a large pool.
        if IS_MASKED:
            is_key = n < end
            slot = tl.load(slots_ptr + n, mask=is_key, other=0).to(tl.int32).to(tl.int64)
        else:
            slot = tl.load(slots_ptr + n).to(tl.int32).to(tl.int64)
        k_at = (slot * k_slot_stride)[None, :] + dim[:, None]
        v_at = (slot * v_slot_stride)[:, None] + v_dim[None, :]
        if IS_MASKED:
            k = tl.load(k_ptr + k_at, mask=is_key[None, :] & (dim < HEAD_DIM)[:, None], other=0)
        elif HEAD_DIM == HEAD_PAD:
            k = tl.load(k_ptr + k_at)
        else:
            k = tl.load(k_ptr + k_at, mask=(dim < HEAD_DIM)[:, None], other=0)
        scores = tl.dot(q, operand(k, q, MANTISSA, HAS_FP8), input_precision=PRECISION)
        if HAS_CAP:
            scores = tanh(scores * score_scale)
            scale = logit_cap
        else:
            scale = score_scale
        if IS_MASKED:
            visible = (n[None, :] <= position[:, None]) & is_key[None, :]
            if HAS_WINDOW:
                visible = visible & (n[None, :] >= position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        # Key 0 is visible to every row, so `top` is finite from the first step on. But a later split, or a block in
        # front of a row's window, may have no key that the row sees, and -inf minus -inf is NaN.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        if (IS_SPLIT or HAS_WINDOW) and IS_MASKED:
            new_top = tl.maximum(new_top, LOWEST)
        keep = tl.exp2(top - new_top)
        p = tl.exp2(scores * scale - new_top[:, None])
        total = total * keep + tl.sum(p, 1)
        if IS_MASKED:
            v = tl.load(v_ptr + v_at, mask=is_key[:, None] & (v_dim < V_DIM)[None, :], other=0)
        elif V_DIM == V_PAD:
            v = tl.load(v_ptr + v_at)
        else:
            v = tl.load(v_ptr + v_at, mask=(v_dim < V_DIM)[None, :], other=0)
        acc = tl.dot(p.to(q.dtype), operand(v, q, MANTISSA, HAS_FP8), acc * keep[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


# Neither counts nor the alignment of an index may compile the kernel again in the middle of serving.
@triton.jit(
    do_not_specialize=[
        "kv_indptr_ptr",
        "kv_indices_ptr",
        "row_indptr_ptr",
        "row_positions_ptr",
        "num_requests",
        "num_rows",
        "num_splits",
        "window",
        "sinks_ptr",
    ]
)
def _sparse_extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    row_indptr_ptr,
    row_positions_ptr,
    out_ptr,
    lse_ptr,
    num_requests,
    num_rows,
    num_splits,
    window,
    score_scale,
    logit_cap,
    v_scale,
    sinks_ptr,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    out_row_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """If keys are split, out is [splits, rows, heads, V_DIM] and lse [splits, rows, heads], fp32 and dense."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, tiles_before = find_tile(tile, row_indptr_ptr, num_requests, TILE_ROWS)
    if request < num_requests:
        row_start = tl.load(row_indptr_ptr + request).to(tl.int32) + (tile - tiles_before) * TILE_ROWS
        row_end = tl.minimum(tl.load(row_indptr_ptr + request + 1).to(tl.int32), row_start + TILE_ROWS)
        kv_start = tl.load(kv_indptr_ptr + request)
        kv_len = (tl.load(kv_indptr_ptr + request + 1) - kv_start).to(tl.int32)

        m = tl.arange(0, BLOCK_M)
        row = row_start + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = row < row_end
        # Rows of padding take position 0: they see one key and stay finite.
        position = tl.load(row_positions_ptr + row, mask=is_row, other=0).to(tl.int32)
        end = tl.minimum(tl.load(row_positions_ptr + row_end - 1).to(tl.int32) + 1, kv_len)
        # Rows ascend, so all see what the first one sees.
        full_end = tl.minimum(tl.load(row_positions_ptr + row_start).to(tl.int32) + 1, kv_len) // BLOCK_N * BLOCK_N
        begin = 0
        if HAS_WINDOW:  # every block may be cut by some row's window
            begin = tl.maximum(tl.load(row_positions_ptr + row_start).to(tl.int32) - window, 0) // BLOCK_N * BLOCK_N
            full_end = begin
        if IS_SPLIT:
            split_len = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
            begin += tl.program_id(2) * split_len
            end = tl.minimum(end, begin + split_len)
            full_end = tl.minimum(full_end, end)

        dim = tl.arange(0, HEAD_PAD)
        v_dim = tl.arange(0, V_PAD)
        row_at = row.to(tl.int64) * q_row_stride + head * q_head_stride
        q = load_q(q_ptr, row_at, is_row, dim, HEAD_DIM, UPCAST)
        k_ptr += kv_head * k_head_stride
        v_ptr += kv_head * v_head_stride
        kv_indices_ptr += kv_start

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
        if HAS_SINKS:  # the first split begins as if it had seen a key of value 0
            is_first = tl.program_id(2) == 0
            sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
            top = tl.where(is_first, sink, top)
            total = tl.where(is_first, 1.0, total)
        for IS_MASKED in tl.static_range(2):
            acc, top, total = _attend(
                acc,
                top,
                total,
                q,
                k_ptr,
                v_ptr,
                kv_indices_ptr,
                tl.maximum(begin, full_end) if IS_MASKED else begin,
                end if IS_MASKED else full_end,
                position,
                window,
                score_scale,
                logit_cap,
                k_slot_stride,
                v_slot_stride,
                HEAD_DIM,
                HEAD_PAD,
                V_DIM,
                V_PAD,
                HAS_CAP,
                HAS_WINDOW,
                IS_SPLIT,
                IS_MASKED,
                BLOCK_N,
                PRECISION,
                MANTISSA,
                HAS_FP8,
            )

        is_out = is_row[:, None] & (v_dim < V_DIM)[None, :]
        out_at = row.to(tl.int64)[:, None] * out_row_stride + head[:, None] * out_head_stride + v_dim[None, :]
        if IS_SPLIT:
            has_keys = total > 0
            result = acc * (v_scale / tl.where(has_keys, total, 1.0))[:, None]
            lse = tl.where(has_keys, top + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
            first_row = tl.program_id(2).to(tl.int64) * num_rows
            tl.store(out_ptr + first_row * out_row_stride + out_at, result, mask=is_out)
            lse_at = (first_row + row) * (GROUP * tl.num_programs(1)) + head
            tl.store(lse_ptr + lse_at, lse, mask=is_row)
        else:
            result = acc * (v_scale / total)[:, None]
            tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    out_row_stride,
    out_head_stride,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    split = tl.arange(0, MAX_SPLITS)
    is_split = split < num_splits
    v_dim = tl.arange(0, V_PAD)
    at = (split.to(tl.int64) * num_rows + row) * num_heads + head
    lse = tl.load(lse_ptr + at, mask=is_split, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    is_partial = is_split[:, None] & (v_dim < V_DIM)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * V_DIM + v_dim[None, :], mask=is_partial, other=0.0)
    result = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    out_at = row * out_row_stride + head * out_head_stride + v_dim
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=v_dim < V_DIM)


def sparse_extend_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor | Sequence[int],
    kv_indices: torch.Tensor,
    row_indptr: torch.Tensor | Sequence[int],
    row_positions: torch.Tensor,
    out: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Write `out`; arguments as in `sparse_extend`. It takes one launch, two if keys are split, and no host
    synchronisation if both indptr are tensors on the device; the last dimension of q, buffers and `out` must be dense.

    Args:
        tile: None = `choose_tile`.
    """
    check_dense(q=q, k_buffer=k_buffer, v_buffer=v_buffer, out=out)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_buffer.shape[1], len(row_indptr) - 1
    group, v_dim = num_q_heads // num_kv_heads, v_buffer.shape[2]
    head_pad, v_pad = (max(triton.next_power_of_2(dim), 16) for dim in (head_dim, v_dim))
    if tile is None:
        is_plain = k_buffer.dtype == q.dtype and (head_pad, v_pad) == (head_dim, v_dim)
        tile = choose_tile(max(head_pad, v_pad), q.element_size(), group, gpu_arch(), is_plain=is_plain)
    tile_rows = tile.block_m // group
    # Every request may end in a tile that is not full.
    max_tiles = triton.cdiv(num_rows, tile_rows) + num_requests
    # As if all keys were of one request: only the device knows how long each request is.
    num_splits = choose_splits(max_tiles * num_kv_heads, kv_indices.numel(), q.device)
    is_split = num_splits > 1
    if is_split:
        target = q.new_empty((num_splits * num_rows, num_q_heads, v_dim), dtype=torch.float32)
        lse = q.new_empty((num_splits * num_rows, num_q_heads), dtype=torch.float32)
    else:
        target, lse = out, out  # no log-sum-exp is written
    # A cap stands between two scales: cap * tanh(score / cap).
    score_scale = sm_scale * k_scale / logit_cap if logit_cap > 0 else sm_scale * k_scale * LOG2_E
    _sparse_extend_kernel[(max_tiles, num_kv_heads, num_splits)](
        q,
        raw(k_buffer),
        raw(v_buffer),
        _on_device(kv_indptr, q.device),
        kv_indices.contiguous(),
        _on_device(row_indptr, q.device),
        row_positions.contiguous(),
        target,
        lse,
        num_requests,
        num_rows,
        num_splits,
        window,
        float(score_scale),
        float(logit_cap * LOG2_E),
        float(v_scale),
        q if sinks is None else sinks.contiguous(),
        *q.stride()[:2],
        *k_buffer.stride()[:2],
        *v_buffer.stride()[:2],
        *target.stride()[:2],
        GROUP=group,
        TILE_ROWS=tile_rows,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        V_DIM=v_dim,
        V_PAD=v_pad,
        HAS_CAP=logit_cap > 0,
        HAS_WINDOW=window >= 0,
        HAS_SINKS=sinks is not None,
        IS_SPLIT=is_split,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **dot_options(q),
        **fp8_options(k_buffer.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if is_split:
        _combine_splits_kernel[(num_rows, num_q_heads)](
            target,
            lse,
            out,
            num_splits,
            *out.stride()[:2],
            V_DIM=v_dim,
            V_PAD=v_pad,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )


def _on_device(indptr: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(indptr, torch.Tensor):
        return indptr.to(device=device, dtype=torch.int64)
    return torch.tensor(indptr, dtype=torch.int64).to(device, non_blocking=True)
