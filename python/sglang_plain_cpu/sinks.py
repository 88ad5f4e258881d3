"""Attention sinks on `torch_native`, which knows none: a logit of each head that takes part in every row's softmax and
has no value (gpt-oss).

Verbs: `forward` (of the backend, with sinks), `attention` (torch's, inside of such a forward), `attend` (the
arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from sglang_plain_cpu.scaled_kv import scaled

_at_hand: ContextVar[torch.Tensor | None] = ContextVar("sinks", default=None)


def forward(
    original: Callable[..., torch.Tensor], *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """A forward of the backend, which asks for `attention`; `original` and the arguments are those of `scaled`.

    Args:
        sinks: `[num_q_heads]`; None = there are none.
    """
    before = _at_hand.set(sinks)
    try:
        return scaled(original, *args, **kwargs)
    finally:
        _at_hand.reset(before)


def attention(
    original: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """What `scaled_dot_product_attention` gives, with the sinks of the forward that asks."""
    sinks = _at_hand.get()
    if sinks is None:
        return original(query, key, value, **options)
    del options["enable_gqa"]
    return attend(query, key, value, sinks, **options)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """`[..., num_q_heads, num_rows, dim]`; arguments as of `scaled_dot_product_attention`, of any number of KV heads.

    Args:
        attn_mask: bool, the keys that a row sees.
    """
    group = query.shape[-3] // key.shape[-3]
    key, value = (one.repeat_interleave(group, dim=-3) for one in (key, value))
    scores = (query @ key.transpose(-2, -1)).float() * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    of_rows = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, of_rows], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
