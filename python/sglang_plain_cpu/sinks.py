"""Attention sinks on `torch_native`, which has none: one more key of each head that every row sees, whose value is 0.

Verbs: `with_sinks` (a forward of the backend that is given some), `attention` (what the backend calls),
`backends_with_sinks` (a model that asks for such a backend may have this one).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

_SINKS: ContextVar[torch.Tensor | None] = ContextVar("sinks", default=None)


def with_sinks(
    original: Callable[..., torch.Tensor], *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """`forward_extend` or `forward_decode` of the backend; `sinks` is `[num_q_heads]`."""
    given = _SINKS.set(sinks)
    try:
        return original(*args, **kwargs)
    finally:
        _SINKS.reset(given)


def attention(
    original: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the sinks of the forward; tensors are `[1, num_heads, num_tokens, dim]`."""
    sinks = _SINKS.get()
    if sinks is None:
        return original(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    # The operator behind it on a CPU, called by name for its log-sum-exp, of which a sink is one term more.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)


def backends_with_sinks(original: Callable[[Any], tuple[str, str]], cfg: Any) -> tuple[str, str]:
    """Prefill's and decode's attention backend, by the name of one that has sinks: gpt-oss asks for one of a list."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    found = original(cfg)
    if cfg.device != "cpu" or not model_config_of(cfg).has_attention_sinks:
        return found
    prefill, decode = ("triton" if one == "torch_native" else one for one in found)
    return prefill, decode
