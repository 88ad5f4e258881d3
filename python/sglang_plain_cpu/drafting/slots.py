"""Slots of the KV pool that drafts write, in the place of kernels of SGLang whose names and shapes they have.

`bs` is the number of requests.
"""

from __future__ import annotations

from typing import Any

import torch


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, out: torch.Tensor, _: int
) -> None:
    """`out` becomes the slots [start, end) of each request, one behind the other."""
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
    """`out` becomes the `topk * num_cols` slots behind each request."""
    places = seq_lens[:, None] + torch.arange(topk * num_cols)
    out.copy_(req_to_token[rows.long()].gather(1, places.long()).view(-1))


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, end: torch.Tensor, slots: torch.Tensor, _: int
) -> None:
    """Positions [start, end) of each request get `slots`, in order."""
    begin = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[begin : begin + last - first]
        begin += last - first


def gather_spec_extras(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Rows of what the last step left for the next draft; None where it left nothing."""
    return tuple(None if buffer is None else buffer[indices.long()] for buffer in buffers)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """`bonus_tokens` `[bs]` becomes the last accepted token of each request."""
    last = accept_tokens.view(-1, stride).gather(1, accept_lens.long()[:, None] - 1)
    bonus_tokens.copy_(last[:, 0])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """`accept_out_cache_loc` begins with the slots of what was accepted, in order."""
    accepted = accept_index.view(-1)
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


def no_kv_copy(pool: Any) -> None:
    """Leaves a pool without a kernel that moves accepted KV; torch moves it, as `SGLANG_NATIVE_MOVE_KV_CACHE` says."""
    pool._kv_copy_config = None
