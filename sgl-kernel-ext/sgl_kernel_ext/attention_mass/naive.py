"""attention_mass by its definition, one row and head at a time: what tests compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def attention_mass_reference(
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
    squared: bool = False,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_mass`, everything computed in `dtype`; `squared`: sums the squares of the softmax instead."""
    (num_rows, num_heads, _), kv_len = q.shape, k.shape[0]
    group = num_heads // k.shape[1]
    weights = torch.zeros(num_rows, kv_len, dtype=dtype, device=q.device)
    for row, position in enumerate(row_positions.tolist()):
        own = slice(position + 1)
        for head in range(num_heads):
            scores = k[own, head // group].to(dtype) @ q[row, head].to(dtype) * (sm_scale * k_scale)
            if logit_cap > 0:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].to(dtype)])
            weights[row, own] += torch.softmax(scores, dim=0)[: position + 1] ** (1 + squared) / num_heads
    given = weights if row_starts is None else weights * (torch.arange(kv_len, device=q.device) >= row_starts[:, None])
    received = given.sum(0)
    if skip_self:
        for row, position in enumerate(row_positions.tolist()):
            received[position] -= weights[row, position]
    if segment_starts is None:
        return received, None
    bounds = [*segment_starts, kv_len]
    segments = [weights[:, a:b].sum(1) for a, b in itertools.pairwise(bounds)]
    return received, torch.stack(segments, dim=1)
