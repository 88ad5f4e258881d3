"""sparse_extend in Triton: flash attention whose tiles stop at their last row's position.

A program computes one tile of rows of one key-value head: the query heads that share this head are rows of the tile
too, so K and V are read once for all of them and a handful of rows still fills a matrix product. Row m of a tile is
query row m // GROUP, member m % GROUP. Which request a tile belongs to is found on the device from `row_indptr`, so
that nothing waits for the GPU; the grid has room for the worst case and tiles past the end leave at once. Tiles of
late positions are the longest and start first.

Where the tiles are too few to fill the GPU, the keys of each are split among several programs (split-K): every program
writes its share's result and log-sum-exp, and a second kernel weighs the shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.backend import check_dense
from sgl_kernel_ext.triton_parts import LOG2_E, dot_options, load_q, tanh

# Below any score, yet finite.
LOWEST = tl.constexpr(-1.0e30)
_MIN_SPLIT_LEN = 512
_MAX_SPLITS = 32


@triton.jit
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
    sm_scale,
    logit_cap,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    out_split_stride,
    out_row_stride,
    out_head_stride,
    lse_split_stride,
    lse_row_stride,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    # The request of this tile: tiles are numbered request by request.
    request_id = tl.arange(0, REQUESTS_PAD)
    exists = request_id < num_requests
    first_row = tl.load(row_indptr_ptr + request_id, mask=exists, other=0)
    num_rows = tl.load(row_indptr_ptr + request_id + 1, mask=exists, other=0) - first_row
    tiles_up_to = tl.cumsum((num_rows + TILE_ROWS - 1) // TILE_ROWS, 0)
    request = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    # Counting also the padding, whose sum is that of all tiles: past the end everything is counted.
    if request < num_requests:
        tiles_before = tl.max(tl.where(request_id < request, tiles_up_to, 0), 0)
        row_start = tl.load(row_indptr_ptr + request) + (tile - tiles_before) * TILE_ROWS
        row_end = tl.minimum(tl.load(row_indptr_ptr + request + 1), row_start + TILE_ROWS)
        kv_start = tl.load(kv_indptr_ptr + request)
        kv_len = tl.load(kv_indptr_ptr + request + 1) - kv_start

        m = tl.arange(0, BLOCK_M)
        row = row_start + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = row < row_end
        # Rows of padding take position 0: they see one key and stay finite.
        position = tl.load(row_positions_ptr + row, mask=is_row, other=0)
        end = tl.minimum(tl.load(row_positions_ptr + row_end - 1) + 1, kv_len)
        begin = 0
        if NUM_SPLITS > 1:
            split_len = tl.cdiv(tl.cdiv(end, BLOCK_N), NUM_SPLITS) * BLOCK_N
            begin = tl.program_id(2) * split_len
            end = tl.minimum(end, begin + split_len)

        dim = tl.arange(0, HEAD_PAD)
        v_dim = tl.arange(0, V_PAD)
        row_at = row.to(tl.int64) * q_row_stride + head * q_head_stride
        q = load_q(q_ptr, row_at, is_row, dim, HEAD_DIM, UPCAST)

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
        for start in range(begin, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            is_key = n < end
            # int64: slot * stride passes 2**31 in a large pool.
            slot = tl.load(kv_indices_ptr + kv_start + n, mask=is_key, other=0).to(tl.int64)
            k_at = slot[None, :] * k_slot_stride + kv_head * k_head_stride + dim[:, None]
            k = tl.load(k_ptr + k_at, mask=is_key[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
            scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * sm_scale
            if HAS_CAP:
                scores = logit_cap * tanh(scores / logit_cap)
            visible = (n[None, :] <= position[:, None]) & is_key[None, :]
            scores = tl.where(visible, scores * LOG2_E, float("-inf"))
            # Key 0 is visible to every row, so `top` is finite from the first step on; a later split may have rows that
            # see none of its keys, and -inf minus -inf is NaN.
            new_top = tl.maximum(top, tl.max(scores, 1))
            if NUM_SPLITS > 1:
                new_top = tl.maximum(new_top, LOWEST)
            keep = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            v_at = slot[:, None] * v_slot_stride + kv_head * v_head_stride + v_dim[None, :]
            v = tl.load(v_ptr + v_at, mask=is_key[:, None] & (v_dim < V_DIM)[None, :], other=0.0)
            total = total * keep + tl.sum(p, 1)
            acc = acc * keep[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
            top = new_top

        is_out = is_row[:, None] & (v_dim < V_DIM)[None, :]
        out_at = row.to(tl.int64)[:, None] * out_row_stride + head[:, None] * out_head_stride + v_dim[None, :]
        if NUM_SPLITS == 1:
            tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)
        else:
            split = tl.program_id(2).to(tl.int64)
            has_keys = total > 0
            result = acc / tl.where(has_keys, total, 1.0)[:, None]
            lse = tl.where(has_keys, top + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
            tl.store(out_ptr + split * out_split_stride + out_at, result, mask=is_out)
            lse_at = split * lse_split_stride + row.to(tl.int64) * lse_row_stride + head
            tl.store(lse_ptr + lse_at, lse, mask=is_row)


@triton.jit
def _combine_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    partial_split_stride,
    partial_row_stride,
    partial_head_stride,
    lse_split_stride,
    lse_row_stride,
    out_row_stride,
    out_head_stride,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS_PAD)
    v_dim = tl.arange(0, V_PAD)
    lse_at = split.to(tl.int64) * lse_split_stride + row * lse_row_stride + head
    lse = tl.load(lse_ptr + lse_at, mask=split < NUM_SPLITS, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    partial_at = split.to(tl.int64)[:, None] * partial_split_stride + row * partial_row_stride
    partial_at += head * partial_head_stride + v_dim[None, :]
    is_partial = (split < NUM_SPLITS)[:, None] & (v_dim < V_DIM)[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=is_partial, other=0.0)
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
    logit_cap: float,
) -> None:
    """Write `out`; arguments as in `sparse_extend`. One launch, two where keys are split, and no host synchronisation
    when both indptr are tensors on the device; the last dimension of q, the buffers and `out` must be dense."""
    check_dense(q=q, k_buffer=k_buffer, v_buffer=v_buffer, out=out)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_buffer.shape[1], len(row_indptr) - 1
    group, v_dim = num_q_heads // num_kv_heads, v_buffer.shape[2]
    head_pad, v_pad = (max(triton.next_power_of_2(dim), 16) for dim in (head_dim, v_dim))
    block_m, block_n, num_warps = _choose_tile(max(head_pad, v_pad), q.element_size(), group)
    tile_rows = block_m // group
    # Every request may end in a tile that is not full.
    max_tiles = triton.cdiv(num_rows, tile_rows) + num_requests
    # Of one request, as far as the host knows: how long each is, only the device does.
    num_splits = _choose_splits(max_tiles * num_kv_heads, kv_indices.numel(), q.device)
    if num_splits > 1:
        target = q.new_empty((num_splits, num_rows, num_q_heads, v_dim), dtype=torch.float32)
        lse = q.new_empty((num_splits, num_rows, num_q_heads), dtype=torch.float32)
    else:
        target, lse = out[None], out[None, :, :, 0]  # no log-sum-exp is written
    _sparse_extend_kernel[(max_tiles, num_kv_heads, num_splits)](
        q,
        k_buffer,
        v_buffer,
        _on_device(kv_indptr, q.device),
        kv_indices.contiguous(),
        _on_device(row_indptr, q.device),
        row_positions.contiguous(),
        target,
        lse,
        num_requests,
        sm_scale,
        logit_cap,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(0),
        k_buffer.stride(1),
        v_buffer.stride(0),
        v_buffer.stride(1),
        target.stride(0),
        target.stride(1),
        target.stride(2),
        lse.stride(0),
        lse.stride(1),
        GROUP=group,
        TILE_ROWS=tile_rows,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        V_DIM=v_dim,
        V_PAD=v_pad,
        REQUESTS_PAD=triton.next_power_of_2(num_requests),
        HAS_CAP=logit_cap > 0,
        NUM_SPLITS=num_splits,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **dot_options(q),
        num_warps=num_warps,
        num_stages=2,
    )
    if num_splits > 1:
        _combine_splits_kernel[(num_rows, num_q_heads)](
            target,
            lse,
            out,
            *target.stride()[:3],
            *lse.stride()[:2],
            *out.stride()[:2],
            V_DIM=v_dim,
            V_PAD=v_pad,
            NUM_SPLITS=num_splits,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            num_warps=1,
        )


def _on_device(indptr: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(indptr, torch.Tensor):
        return indptr.to(device=device, dtype=torch.int64)
    return torch.tensor(indptr, dtype=torch.int64).to(device, non_blocking=True)


def _choose_splits(num_programs: int, num_keys: int, device: torch.device) -> int:
    """Among how many programs the keys of one tile are split: enough that every multiprocessor has two.

    A power of two, as each count is compiled by itself. Not tuned on a GPU yet: 512 keys are a few microseconds' work.
    """
    if device.type != "cuda":
        return 1
    wanted = triton.cdiv(2 * torch.cuda.get_device_properties(device).multi_processor_count, num_programs)
    most = max(1, min(wanted, num_keys // _MIN_SPLIT_LEN, _MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def _choose_tile(dim_pad: int, element_size: int, group: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps), small enough for the shared memory of a GPU; not tuned on one yet."""
    is_wide, is_fp32 = dim_pad > 128, element_size == 4
    block_m, block_n = (32, 32) if is_wide or is_fp32 else (64, 64)
    if is_wide and is_fp32:
        block_n = 16
    return max(block_m, triton.next_power_of_2(group)), block_n, 4
