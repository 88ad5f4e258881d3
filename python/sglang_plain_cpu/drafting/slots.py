"""Slots of the KV pool for drafts. The functions replace kernels of SGLang, and have their names and shapes.

`bs` is the number of requests.
"""

from __future__ import annotations

from typing import Any

import torch


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, out: torch.Tensor, _: int
) -> None:
    """Writes the slots of positions [start, end) of each request to the beginning of `out`, request after request."""
    ranges = zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, first:last] for row, first, last in ranges])
    out[: len(slots)] = slots


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    _: int,
    topk: int,
    num_cols: int,
) -> None:
    """Writes the next `topk * num_cols` slots behind each request to `out`."""
    places = seq_lens[:, None] + torch.arange(topk * num_cols)
    out.copy_(req_to_token[rows.long()].gather(1, places.long()).view(-1))


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, slots: torch.Tensor, _: int
) -> None:
    """Gives `slots`, in order, to the positions [start, end) of each request."""
    begin = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[begin : begin + last - first]
        begin += last - first


def gather_spec_extras(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Rows of each buffer that the last step left for the next draft; None for a missing buffer."""
    return tuple(None if buffer is None else buffer[indices.long()] for buffer in buffers)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """Writes the last accepted token of each request to `bonus_tokens` `[bs]`."""
    last = accept_tokens.view(-1, stride).gather(1, accept_lens.long()[:, None] - 1)
    bonus_tokens.copy_(last[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Writes the slots of the accepted tokens, in order, to the beginning of `accept_out_cache_loc`."""
    accepted = accept_index.view(-1)
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


def no_kv_copy(pool: Any) -> None:
    """Leaves a pool without the kernel that moves accepted KV; `SGLANG_NATIVE_MOVE_KV_CACHE` makes torch move it."""
    pool._kv_copy_config = None
