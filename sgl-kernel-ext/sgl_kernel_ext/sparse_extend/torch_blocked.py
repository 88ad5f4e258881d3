"""sparse_extend in torch, by blocks of rows: the CPU path of the product.

    TorchPlan   once per forward: reads lengths, positions and slots on the host, cuts the rows, makes the masks
    attend      once per layer: gathers and attention only

For each request K and V are gathered (or sliced, where the slots are consecutive), and its rows are cut into

    runs     many consecutive positions: the keys before the run without a mask, the run itself as a causal square,
             both by flash attention, joined by their log-sum-exp. A whole prompt is one causal square.
    blocks   a few rows anywhere: flash attention over keys [0, last row of the block] with a mask

so that a row of a block computes scores in vain only for keys that other rows of the block see. K and V are never
repeated for the query heads that share them. A logit cap and sinks, which flash attention lacks, take plain matrix
products over blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext.backend import raw

# Measured on 2 cores (AMD EPYC, Zen 5), torch 2.14, 14 query heads and 2 key-value heads x 64, fp32, one and two
# threads, as ms in blocks of 32 / 64 / 192: 192 rows over 1,300 keys 10.0 / 11.8 / 15.1 and 5.1 / 5.8 / 7.6, 632 over
# 4,160 86 / 92 / 103 and 45 / 47 / 49, 52 over 4,160 12.2 / 14.7 / 14.6. On an Intel Xeon at 2.5 GHz 576 rows in eight
# places of 4,096 keys, 12 heads x 64: 119 / 117 / 73, as from 192 rows on flash attention takes 64 at a time there.
_BLOCK_ROWS = 32
_WIDE_BLOCK_ROWS = 192
_MIN_WIDE_ROWS = 384
# Few keys are one block, gathered by index: 42 rows over 240 keys, 4 query heads and 2 x 32, 0.17 ms instead of 0.28.
_MAX_SHORT_LEN = 512
_MIN_COPY_ROWS = 96
_MIN_RUN_ROWS = 256
# Mean length of runs of consecutive slots from which they are copied one by one, head by head. One core of an Intel
# Xeon at 2.5 GHz, 12 heads x 64, attention against the same with K and V by index: 1,284 slots in runs of 120 and 202
# rows 1.24x as fast, 4,160 in runs of 448 and 643 rows 1.21x, 1,284 in runs of 32 the same.
_MIN_MEAN_RUN = 32


IndPtr = torch.Tensor | Sequence[int]
Index = tuple[IndPtr, torch.Tensor, IndPtr, torch.Tensor]
"""kv_indptr, kv_indices, row_indptr and row_positions of `sparse_extend`."""


@dataclass(frozen=True)
class _Block:
    rows: slice  # of q and out
    begin: int  # keys [begin, end) are read: from the first that the first row sees ...
    end: int  # ... up to the position of the last row
    seen: torch.Tensor | None  # [num_rows, end - begin] bool; None: the rows are a run


@dataclass(frozen=True)
class _Request:
    slots: torch.Tensor  # [position of the last row + 1]: what is not visible is not read
    runs: list[tuple[int, int]] | None  # (first slot, length) of consecutive slots, in order; None where they are short
    blocks: list[_Block]
    by_head: bool  # whether K and V are laid out head by head, as blocks want it: if many rows are masked


class TorchPlan:
    """The part of a forward's attention that depends only on positions and slots.

    Raises:
        ValueError: lengths do not fit, or positions do not ascend.
    """

    def __init__(self, index: Index) -> None:
        kv_indptr, self._kv_indices, row_indptr, self._positions = index
        self._kv_bounds, self._row_bounds = as_list(kv_indptr), as_list(row_indptr)
        if self._kv_bounds[-1] > self._kv_indices.numel() or self._row_bounds[-1] != self._positions.numel():
            raise ValueError(
                f"kv_indptr, row_indptr: end at {self._kv_bounds[-1]} and {self._row_bounds[-1]}, but there are "
                f"{self._kv_indices.numel()} kv_indices and {self._positions.numel()} rows"
            )
        self._requests: dict[tuple[bool, int], list[_Request]] = {}

    def attend(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        out: torch.Tensor,
        *,
        sm_scale: float,
        logit_cap: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        window: int = -1,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write `out`, for one layer."""
        sm_scale *= k_scale
        is_plain = logit_cap > 0 or sinks is not None
        can_run = not is_plain and window < 0 and q.shape[2] == v_buffer.shape[2] and q.device.type == "cpu"
        if (can_run, window) not in self._requests:
            self._requests[can_run, window] = list(self._cut(can_run, window))
        for request in self._requests[can_run, window]:
            k, v = (_gather(raw(buffer), request).view(buffer.dtype).to(q.dtype) for buffer in (k_buffer, v_buffer))
            for block in request.blocks:
                args = q[block.rows], k[block.begin : block.end], v[block.begin : block.end]
                if block.seen is None:
                    out[block.rows] = _attend_run(*args, sm_scale)
                elif is_plain:
                    out[block.rows] = _attend_plainly(*args, block.seen, sm_scale, logit_cap, sinks)
                else:
                    out[block.rows] = _flash(*args, attn_mask=block.seen, scale=sm_scale)
        if v_scale != 1.0:
            out *= v_scale

    def _cut(self, can_run: bool, window: int) -> Iterator[_Request]:
        for request, (begin, end) in enumerate(pairwise(self._row_bounds)):
            if begin == end:
                continue
            first = self._kv_bounds[request]
            kv_len = self._kv_bounds[request + 1] - first
            positions = self._positions[begin:end]
            at = positions.tolist()
            if at[-1] >= kv_len or at[0] < 0 or any(b <= a for a, b in pairwise(at)):
                raise ValueError(f"row_positions: those of request {request} must ascend within [0, {kv_len})")
            slots = self._kv_indices[first : first + at[-1] + 1]
            blocks = []
            for a, b, is_run in cut_rows(at, can_run):
                first_seen = 0 if window < 0 else max(0, at[a] - window)
                last = at[b - 1] + 1
                seen = None if is_run else _seen(positions[a:b], first_seen, last, window)
                blocks.append(_Block(slice(begin + a, begin + b), first_seen, last, seen))
            num_masked = sum(block.rows.stop - block.rows.start for block in blocks if block.seen is not None)
            by_head = num_masked >= _MIN_COPY_ROWS and slots.numel() > _MAX_SHORT_LEN
            yield _Request(slots, _runs_of(slots), blocks, by_head)


def _seen(positions: torch.Tensor, begin: int, end: int, window: int) -> torch.Tensor:
    """`[num_rows, end - begin]` bool: which of the keys [begin, end) each row sees."""
    distance = positions[:, None] - torch.arange(begin, end, device=positions.device)
    return distance >= 0 if window < 0 else (distance >= 0) & (distance <= window)


def as_list(indptr: IndPtr) -> list[int]:
    return indptr.tolist() if isinstance(indptr, torch.Tensor) else list(indptr)


def cut_rows(positions: Sequence[int], can_run: bool) -> Iterator[tuple[int, int, bool]]:
    """Cut ascending positions into (start, stop, is_run), in order; a run is as long as positions are consecutive."""
    num_rows, kv_len = len(positions), positions[-1] + 1
    runs: list[tuple[int, int]] = []
    if can_run and kv_len == num_rows:
        runs = [(0, num_rows)]
    elif can_run and num_rows >= _MIN_RUN_ROWS:
        borders = [0, *(i for i in range(1, num_rows) if positions[i] != positions[i - 1] + 1), num_rows]
        runs = [(a, b) for a, b in pairwise(borders) if b - a >= _MIN_RUN_ROWS]
    block_rows = _WIDE_BLOCK_ROWS if num_rows >= _MIN_WIDE_ROWS else _BLOCK_ROWS
    if kv_len <= _MAX_SHORT_LEN:
        block_rows = kv_len
    at = 0
    for start, stop in [*runs, (num_rows, num_rows)]:
        for a in range(at, start, block_rows):
            yield a, min(a + block_rows, start), False
        if start < stop:
            yield start, stop, True
        at = stop


def _runs_of(slots: torch.Tensor) -> list[tuple[int, int]] | None:
    breaks = (slots.diff() != 1).nonzero().flatten() + 1
    is_short = slots.numel() <= _MAX_SHORT_LEN and breaks.numel()
    if is_short or slots.numel() < _MIN_MEAN_RUN * breaks.numel():
        return None
    borders = [0, *breaks.tolist(), slots.numel()]
    firsts = slots[borders[:-1]].tolist()
    return [(first, b - a) for first, (a, b) in zip(firsts, pairwise(borders), strict=True)]


def _gather(buffer: torch.Tensor, request: _Request) -> torch.Tensor:
    """The request's keys or values, [num_slots, num_kv_heads, dim]: a view of the buffer if all slots are one run.

    Otherwise, or if `by_head`, it is a copy; that of several long runs, and any if `by_head`, lies head by head.
    """
    runs, slots = request.runs, request.slots
    if runs is not None and len(runs) == 1:
        first, length = runs[0]
        gathered = buffer[first : first + length]
    elif runs is None or buffer.device.type != "cpu":
        gathered = buffer.index_select(0, slots)
    else:
        copy = buffer.new_empty(buffer.shape[1], slots.numel(), buffer.shape[2])
        at = 0
        for first, length in runs:
            copy[:, at : at + length] = buffer[first : first + length].transpose(0, 1)
            at += length
        return copy.transpose(0, 1)
    return gathered.transpose(0, 1).contiguous().transpose(0, 1) if request.by_head else gathered


# In each of these q and the result are [num_rows, num_q_heads, dim], k and v are [num_keys, num_kv_heads, dim].


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    is_shared = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, enable_gqa=is_shared, **options)[0].transpose(0, 1)


def _attend_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """Attention of rows at the last `len(q)` positions of k and v."""
    prefix_len = k.shape[0] - q.shape[0]
    if not prefix_len:
        return _flash(q, k, v, is_causal=True, scale=sm_scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    # The operator behind scaled_dot_product_attention on the CPU; called by name for its log-sum-exp.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = flash(q, k[:, :, prefix_len:], v[:, :, prefix_len:], 0.0, True, scale=sm_scale)
    before, before_lse = flash(q, k[:, :, :prefix_len], v[:, :, :prefix_len], 0.0, False, scale=sm_scale)
    weight = torch.sigmoid(before_lse - own_lse)[..., None]
    return torch.lerp(own.float(), before.float(), weight)[0].transpose(0, 1)


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with scores `cap * tanh(score / cap)`, or with sinks; `seen` is [num_rows, num_keys]."""
    num_rows, num_q_heads, _ = q.shape
    num_kv_heads, group = k.shape[1], num_q_heads // k.shape[1]
    # The query heads of a key-value head as more rows of it: [num_kv_heads, group * num_rows, dim].
    rows = q.view(num_rows, num_kv_heads, group, -1).permute(1, 2, 0, 3).reshape(num_kv_heads, group * num_rows, -1)
    scale = sm_scale / logit_cap if logit_cap > 0 else sm_scale
    scores = torch.bmm(rows.float() * scale, k.permute(1, 2, 0).float())
    if logit_cap > 0:
        scores.tanh_().mul_(logit_cap)
    scores.masked_fill_(~seen.repeat(group, 1), float("-inf"))
    if sinks is not None:
        of_rows = sinks.to(scores).view(num_kv_heads, group, 1).expand(-1, -1, num_rows)
        scores = torch.cat([scores, of_rows.reshape(num_kv_heads, -1, 1)], dim=2)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    result = torch.bmm(weights, v.transpose(0, 1).float())
    return result.view(num_kv_heads, group, num_rows, -1).permute(2, 0, 1, 3).reshape(num_rows, num_q_heads, -1)
