"""Softmax mass: how much attention some query rows give to each key, without writing the attention matrix.

    attention_mass   the mass that each key receives from the rows, and optionally what each row gives to each segment

    keys        0 1 2 3 4 5 6 7            received[j] = sum over rows of mean over heads of softmax(q k)[row, j]
    row at 4    x x x x x                  by_segment[row, s] = the same, summed over the keys of segment s instead
    row at 7    x x x x x x x x

A row at position p sees the keys 0..p. Scores and sums are fp32. On a CPU the scores of only one block of rows exist at
a time; on a GPU a Triton kernel keeps a tile of scores in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_kernel_ext.backend import Backend, check_sinks, resolve_backend
from sgl_kernel_ext.transfer import upload

__all__ = ["attention_mass"]

# Scores that exist at one time; on a CPU as many as its second-level caches hold, since they are read several times.
_BLOCK_ELEMENTS_CPU = 1 << 19
_BLOCK_ELEMENTS = 1 << 22


def attention_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    segment_starts: Sequence[int] | None = None,
    skip_self: bool = False,
    row_starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax mass of one request's rows on its keys.

    Used for Cache-Craft's statistics and focused chunks (section 3), and A3's token scores. Questions that ask before
    rows are chosen have `question_mass`.

    Args:
        q: [num_rows, num_q_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim], fp8 too; query head h reads key head h // (num_q_heads // num_kv_heads).
        row_positions: [num_rows] int64, each in [0, kv_len); the row sees keys up to and including its own.
        sm_scale: factor of q.k.
        k_scale: K is this times what is stored; for fp8.
        logit_cap: where positive, scores are `cap * tanh(score / cap)`.
        segment_starts: ascending, from 0; segment i is keys [starts[i], starts[i + 1]), the last one ends at kv_len.
        skip_self: leave out of `received` what a row gives to the key at its own position.
        row_starts: [num_rows] int64, at most the row's position: what the row gives to keys in front of it is left out
            of `received`. So one call serves rows of several chunks, each counted within its own. The torch path only.
        sinks: [num_q_heads], as in `sparse_extend`; the mass that they take belongs to no key.

    Returns:
        `received` [kv_len] fp32, and `by_segment` [num_rows, num_segments] fp32 where `segment_starts` is given.

    Raises:
        ValueError: shapes do not fit together, or `row_starts` is given and the implementation is Triton.

    Example:
        >>> q, k = torch.randn(2, 8, 64), torch.randn(10, 2, 64)
        >>> received, _ = attention_mass(q, k, torch.tensor([3, 9]), sm_scale=0.125)
        >>> received.shape, round(float(received.sum()), 3)
        (torch.Size([10]), 2.0)
    """
    _check(q, k, row_positions, segment_starts)
    check_sinks(sinks, q.shape[1])
    sm_scale *= k_scale
    if q.shape[0] and k.shape[0] and resolve_backend(backend, q.device, "attention_mass") == "triton":
        if row_starts is not None:
            raise ValueError("row_starts: the Triton path has no such bound; call it once for each start")
        from sgl_kernel_ext.attention_mass.triton import attention_mass_triton

        return attention_mass_triton(
            *(q, k, row_positions, segment_starts, sinks), sm_scale=sm_scale, logit_cap=logit_cap, skip_self=skip_self
        )
    return mass_by_torch(
        *(q, k, row_positions),
        sm_scale=sm_scale,
        logit_cap=logit_cap,
        segment_starts=segment_starts,
        skip_self=skip_self,
        row_starts=row_starts,
        sinks=sinks,
    )


def mass_by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float,
    segment_starts: Sequence[int] | None = None,
    skip_self: bool = False,
    row_starts: torch.Tensor | None = None,
    squared: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_mass` in torch, with no scale of K; `squared`: sums the squares of the softmax instead."""
    (num_rows, num_q_heads, _head_dim), (kv_len, _num_kv_heads, _) = q.shape, k.shape
    is_cpu = q.device.type == "cpu"
    received = q.new_zeros(kv_len, dtype=torch.float32)
    member = None if segment_starts is None else _membership(segment_starts, kv_len, q.device)
    by_segment = None if member is None else q.new_zeros(num_rows, member.shape[1], dtype=torch.float32)
    keys = k.float().permute(1, 2, 0)  # [num_kv_heads, head_dim, kv_len]
    key_positions = torch.arange(kv_len, device=q.device)
    elements = _BLOCK_ELEMENTS_CPU if is_cpu else _BLOCK_ELEMENTS
    block_rows = max(1, elements // max(1, num_q_heads * kv_len))
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(start + block_rows, num_rows))
        positions = row_positions[rows]
        # On a CPU, keys behind the last row of the block are left out; on a GPU, finding that row would wait for it.
        num_keys = int(positions.max()) + 1 if is_cpu else kv_len
        first_masked = int(positions.min()) + 1 if is_cpu else 0
        scores = _scores(q[rows], keys[..., :num_keys], sm_scale, logit_cap)  # [num_q_heads, rows, num_keys]
        masked = scores[..., first_masked:]
        masked.masked_fill_(key_positions[first_masked:num_keys] > positions[:, None], float("-inf"))
        weights = _softmax(scores, sinks)
        weights = (weights.square_() if squared else weights).sum(0)
        if row_starts is None:
            received[:num_keys] += weights.sum(0)
        else:
            starts = row_starts[rows]
            first = int(starts.min()) if is_cpu else 0
            is_before = key_positions[first:num_keys] < starts[:, None]
            received[first:num_keys] += weights[:, first:].masked_fill(is_before, 0.0).sum(0)
        if skip_self:
            received.index_add_(0, positions, weights.gather(1, positions[:, None])[:, 0], alpha=-1.0)
        if by_segment is not None and member is not None:
            torch.mm(weights, member[:num_keys], out=by_segment[rows])
    # Sums over heads become means only here, where there are few numbers to divide.
    return received.div_(num_q_heads), None if by_segment is None else by_segment.div_(num_q_heads)


def _scores(q: torch.Tensor, keys: torch.Tensor, sm_scale: float, logit_cap: float) -> torch.Tensor:
    """[num_q_heads, rows, num_keys] fp32."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    grouped = q.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = q.new_empty(num_kv_heads, grouped.shape[1], keys.shape[2], dtype=torch.float32)
    torch.baddbmm(scores, grouped.float(), keys, beta=0.0, alpha=sm_scale, out=scores)
    scores = scores.view(num_q_heads, num_rows, -1)
    if logit_cap > 0:
        scores = (scores / logit_cap).tanh_().mul_(logit_cap)
    return scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of [num_q_heads, rows, num_keys] scores, which may be overwritten."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    lse = torch.logaddexp(scores.logsumexp(-1), sinks.float()[:, None])
    return scores.sub_(lse[..., None]).exp_()


def _membership(segment_starts: Sequence[int], kv_len: int, device: torch.device) -> torch.Tensor:
    """[kv_len, num_segments] fp32, 1 where the key is of the segment: a matrix product with it sums over segments."""
    bounds = upload([np.array([*segment_starts, kv_len], dtype=np.int64)], device)[0]
    keys = torch.arange(kv_len, device=device)[:, None]
    return ((keys >= bounds[:-1]) & (keys < bounds[1:])).float()


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    row_positions: torch.Tensor,
    segment_starts: Sequence[int] | None,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q, k: shapes {tuple(q.shape)} and {tuple(k.shape)} do not fit: head_dim or head count")
    if row_positions.shape != (q.shape[0],) or row_positions.dtype != torch.int64:
        raise ValueError(
            f"row_positions: {row_positions.dtype} {tuple(row_positions.shape)}, need int64 ({q.shape[0]},)"
        )
    if segment_starts is not None:
        starts = list(segment_starts)
        if not starts or starts[0] != 0 or starts != sorted(starts) or starts[-1] > k.shape[0]:
            raise ValueError(f"segment_starts: {starts} must ascend from 0 within {k.shape[0]} keys")
