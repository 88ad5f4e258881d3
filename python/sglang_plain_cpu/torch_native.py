"""What SGLang's attention backend `torch_native` lacks: scales of an FP8 KV cache, attention sinks, padding.

Verbs: `forward` (of the backend), `attention` (the operation that it calls), `padded_len` (length of padding requests),
`backends_with_sinks` (lets models with sinks use this backend). If there are no sinks, and all scales are 1 (as they
are unless a checkpoint has others), nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SINKS: ContextVar[torch.Tensor | None] = ContextVar("sinks", default=None)


def forward(
    original: Callable[..., torch.Tensor], *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """`forward_extend` or `forward_decode` of the backend, with the `sinks` `[num_q_heads]` of `attention`."""
    given = _SINKS.set(sinks)
    try:
        return _scaled(original, *args, **kwargs)
    finally:
        _SINKS.reset(given)


def _scaled(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Divides K and V by the scales of their layer when it stores them, as SGLang's other backends do, and attends."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    kv_pool = backend.token_to_kv_pool
    k_scale, v_scale = (1.0 if scale is None else scale for scale in (layer.k_scale_float, layer.v_scale_float))
    if kv_pool.dtype not in FP8 or (k_scale, v_scale) == (1.0, 1.0):
        return original(backend, q, k, v, layer, batch, save_kv_cache, **kwargs)
    if save_kv_cache and k is not None:
        k, v = k.clone(), v.clone()  # the pool divides its arguments in place
        scales = () if hasattr(kv_pool, "kv_lora_rank") else (layer.k_scale, layer.v_scale)
        kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v, *scales)
    # Scores are linear in K and the result is linear in V, so the scales can be applied to q and to the result.
    return original(backend, q * k_scale, k, v, layer, batch, False, **kwargs) * v_scale


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the sinks of the forward; tensors are `[1, num_heads, num_tokens, dim]`.

    A sink is one more key of a head, which every row attends to, and whose value is 0.
    """
    sinks = _SINKS.get()
    if sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    # `scaled_dot_product_attention` runs this operator on a CPU. It also returns the log-sum-exp, to which a sink adds.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return out * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(out.dtype)


def padded_len(_backend: Any) -> int:
    """Tokens of a request that only pads a batch to the size of other ranks' batches: one, in a slot nobody uses."""
    return 1


def backends_with_sinks(original: Callable[[Any], tuple[str, str]], cfg: Any) -> tuple[str, str]:
    """Names of the attention backends of prefill and decode. For a model with sinks (gpt-oss), `torch_native` is named
    `triton`, because SGLang accepts only the backends of a list."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    found = original(cfg)
    if cfg.device != "cpu" or not model_config_of(cfg).has_attention_sinks:
        return found
    prefill, decode = ("triton" if one == "torch_native" else one for one in found)
    return prefill, decode
