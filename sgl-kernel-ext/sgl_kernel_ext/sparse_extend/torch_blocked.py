"""sparse_extend in torch, by blocks of rows: the CPU path of the product.

For each request K and V are gathered once (or sliced, where the slots are consecutive), and its rows are cut into

    runs     many consecutive positions: the keys before the run without a mask, the run itself as a causal square,
             both by flash attention, joined by their log-sum-exp. A whole prompt is one causal square.
    blocks   a few rows anywhere: flash attention over keys [0, last row of the block] with a mask

so that beyond the needed scores only half a block's reach of keys is computed in vain. Query heads that share a
key-value head are laid out as more rows of it; K and V are never repeated. A logit cap, which flash attention lacks,
takes plain matrix products over the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

# Measured on 2 cores (AMD EPYC, Zen 5), torch 2.14, 12 heads x 64, 4,096 keys, fp32, as ms at 60 / 300 / 700 scattered
# rows: blocks of 32: 4.8 / 16.7 / 35.8, 64: 6.2 / 18.0 / 37.0, 128: - / 19.9 / 39.0, 256: - / 23.6 / 40.6;
# plain matrix products at 32: 5.8 / 18.9 / 39.8. A causal square costs 160 ms, blocks of 256 for the same rows 176 ms.
# On 2 cores of an Intel Xeon at 2.5 GHz, 576 rows in eight places: blocks of 32: 119, 128: 116, 192: 73, 256: 83; with
# K and V copied head by head first 88, 86, 55, 63, at 120 rows 28 instead of 31, at 60 rows 21 instead of 19. From 192
# rows on flash attention works on 64 at a time.
_BLOCK_ROWS = 32
_WIDE_BLOCK_ROWS = 192
_MIN_WIDE_ROWS = 384
_MIN_COPY_ROWS = 96
_MAX_BLOCK_ROWS = 256
_MIN_RUN_ROWS = 256
# Mean length of runs of consecutive slots from which they are copied one by one, head by head. One core of an Intel
# Xeon at 2.5 GHz, 12 heads x 64, attention against the same with K and V by index: 1,284 slots in runs of 120 and 202
# rows 1.24x as fast, 4,160 in runs of 448 and 643 rows 1.21x, 1,284 in runs of 32 the same.
_MIN_MEAN_RUN = 32


def sparse_extend_torch(
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
    """Write `out`; arguments as in `sparse_extend`. Reads positions on the host."""
    kv_bounds, row_bounds = _as_list(kv_indptr), _as_list(row_indptr)
    if kv_bounds[-1] > kv_indices.numel() or row_bounds[-1] != q.shape[0]:
        raise ValueError(
            f"kv_indptr, row_indptr: end at {kv_bounds[-1]} and {row_bounds[-1]}, but there are "
            f"{kv_indices.numel()} kv_indices and {q.shape[0]} rows"
        )
    for request in range(len(kv_bounds) - 1):
        rows = slice(row_bounds[request], row_bounds[request + 1])
        if rows.start == rows.stop:
            continue
        kv_len = kv_bounds[request + 1] - kv_bounds[request]
        positions = row_positions[rows]
        _check_positions(positions, kv_len, request)
        # Nothing after the last row is visible; what lies in those slots is not read.
        slots = kv_indices[kv_bounds[request] : kv_bounds[request] + int(positions[-1]) + 1]
        runs = _runs_of(slots)
        k, v = (_gather(buffer, slots, runs).to(q.dtype) for buffer in (k_buffer, v_buffer))
        _attend_request(q[rows], k, v, positions, out[rows], sm_scale, logit_cap)


def _as_list(indptr: torch.Tensor | Sequence[int]) -> list[int]:
    return indptr.tolist() if isinstance(indptr, torch.Tensor) else list(indptr)


def _check_positions(positions: torch.Tensor, kv_len: int, request: int) -> None:
    if int(positions[-1]) >= kv_len or int(positions[0]) < 0 or bool((positions.diff() <= 0).any()):
        raise ValueError(f"row_positions: those of request {request} must ascend within [0, {kv_len})")


def _runs_of(slots: torch.Tensor) -> list[tuple[int, int]] | None:
    """(first slot, length) of each run of consecutive slots, in order; None where runs are short."""
    breaks = (slots.diff() != 1).nonzero().flatten() + 1
    if slots.numel() < _MIN_MEAN_RUN * breaks.numel():
        return None
    borders = [0, *breaks.tolist(), slots.numel()]
    firsts = slots[borders[:-1]].tolist()
    return [(first, b - a) for first, (a, b) in zip(firsts, pairwise(borders), strict=True)]


def _gather(buffer: torch.Tensor, slots: torch.Tensor, runs: list[tuple[int, int]] | None) -> torch.Tensor:
    """`buffer` at `slots`, [num_slots, num_kv_heads, dim]: a view of it where all are one run, else a copy.

    A copy of long runs lies head by head in memory, which is how attention in blocks wants it.
    """
    if runs is None or (len(runs) > 1 and buffer.device.type != "cpu"):
        return buffer.index_select(0, slots)
    if len(runs) == 1:
        first, length = runs[0]
        return buffer[first : first + length]
    copy = buffer.new_empty(buffer.shape[1], slots.numel(), buffer.shape[2])
    at = 0
    for first, length in runs:
        copy[:, at : at + length] = buffer[first : first + length].transpose(0, 1)
        at += length
    return copy.transpose(0, 1)


def _attend_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
) -> None:
    """q, out: [num_rows, num_q_heads, dim]; k, v: [last position + 1, num_kv_heads, dim]."""
    can_run = logit_cap <= 0 and q.shape[2] == v.shape[2] and q.device.type == "cpu"
    block_rows = _choose_block_rows(q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    pieces = list(_cut(positions, block_rows, _MIN_RUN_ROWS if can_run else None))
    if sum(stop - start for start, stop, is_run in pieces if not is_run) >= _MIN_COPY_ROWS:
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    for start, stop, is_run in pieces:
        rows = slice(start, stop)
        if is_run:
            end = int(positions[stop - 1]) + 1
            _attend_run(q[rows], k[:end], v[:end], out[rows], sm_scale)
        else:
            _attend_block(q[rows], k, v, positions[rows], out[rows], sm_scale, logit_cap)


def _choose_block_rows(num_rows: int, num_kv_heads: int, group: int) -> int:
    """Enough rows that every thread has work: flash attention hands out 32 rows of one head at a time.

    Where there are many, as many as make it hand out 64; the `group` query heads of a key-value head are rows of it.
    """
    per_head = -(-2 * torch.get_num_threads() // num_kv_heads)
    least = min(_BLOCK_ROWS * max(per_head, 1), _MAX_BLOCK_ROWS)
    return max(least, -(-_WIDE_BLOCK_ROWS // group)) if num_rows * group >= _MIN_WIDE_ROWS else least


def _cut(positions: torch.Tensor, block_rows: int, min_run_rows: int | None) -> Iterator[tuple[int, int, bool]]:
    """Cut the rows into (start, stop, is_run), in order; runs are consecutive positions, as long as they go."""
    num_rows = positions.numel()
    runs: list[tuple[int, int]] = []
    if min_run_rows is not None and num_rows >= min_run_rows:
        inner = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
        borders = [0, *inner, num_rows]
        runs = [(a, b) for a, b in pairwise(borders) if b - a >= min_run_rows]
    at = 0
    for start, stop in [*runs, (num_rows, num_rows)]:
        for a in range(at, start, block_rows):
            yield a, min(a + block_rows, start), False
        if start < stop:
            yield start, stop, True
        at = stop


def _attend_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sm_scale: float) -> None:
    """Rows at the last `len(q)` positions of k and v."""
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    prefix_len = k.shape[0] - q.shape[0]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    # A causal square cannot take the query heads of one key-value head as more rows, so they go one after another.
    for member in range(group):
        heads = slice(member, num_kv_heads * group, group)
        member_q = q[:, heads].transpose(0, 1)[None]
        result = _flash_run(member_q, k, v, prefix_len, sm_scale)
        out[:, heads] = result[0].transpose(0, 1)


def _flash_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix_len: int, sm_scale: float) -> torch.Tensor:
    """[1, num_heads, rows, dim] each, rows at positions prefix_len.. of k and v."""
    if not prefix_len:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale)
    # The operator behind scaled_dot_product_attention on the CPU; called by name for its log-sum-exp.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = flash(q, k[:, :, prefix_len:], v[:, :, prefix_len:], 0.0, True, scale=sm_scale)
    before, before_lse = flash(q, k[:, :, :prefix_len], v[:, :, :prefix_len], 0.0, False, scale=sm_scale)
    weight = torch.sigmoid(before_lse - own_lse)[..., None]
    return torch.lerp(own.float(), before.float(), weight)


def _attend_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
) -> None:
    """Rows at ascending `positions`, at most `_MAX_BLOCK_ROWS` of them."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[1], num_q_heads // k.shape[1]
    first, end = int(positions[0]) + 1, int(positions[-1]) + 1
    k, v = k[:end].transpose(0, 1), v[:end].transpose(0, 1)
    # [num_kv_heads, num_rows * group, head_dim]: row r of member g is at r * group + g.
    grouped = q.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    hidden = torch.arange(first, end, device=q.device) > positions[:, None]  # keys before `first` are seen by all
    if group > 1:
        hidden = hidden.repeat_interleave(group, dim=0)
    if logit_cap > 0:
        result = _attend_capped(grouped, k, v, hidden, first, sm_scale, logit_cap)
    else:
        mask = q.new_zeros(num_rows * group, end)
        mask[:, first:].masked_fill_(hidden, float("-inf"))
        result = scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=sm_scale)[0]
    out.copy_(result.view(num_kv_heads, num_rows, group, -1).transpose(0, 1).reshape(out.shape))


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    first: int,
    sm_scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """[num_kv_heads, rows, dim] each; `hidden` [rows, end - first] over the keys from `first` on."""
    scores = torch.bmm(q.float() * (sm_scale / logit_cap), k.float().transpose(1, 2)).tanh_().mul_(logit_cap)
    scores[:, :, first:].masked_fill_(hidden, float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=-1), v.float())
