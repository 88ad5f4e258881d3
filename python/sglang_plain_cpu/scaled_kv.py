"""Scales of an FP8 KV cache on `torch_native`, which stores and reads K and V as if they had none.

Where scales are 1, which they are unless a checkpoint has others, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled(
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
    """A forward of the backend that divides K and V by the scales of their layer when it stores them.

    SGLang's other backends do the same. `original` is `forward_extend` or `forward_decode`.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    kv_pool = backend.token_to_kv_pool
    k_scale, v_scale = (1.0 if scale is None else scale for scale in (layer.k_scale_float, layer.v_scale_float))
    if kv_pool.dtype not in FP8 or (k_scale, v_scale) == (1.0, 1.0):
        return original(backend, q, k, v, layer, batch, save_kv_cache, **kwargs)
    if save_kv_cache and k is not None:
        k, v = k.clone(), v.clone()  # the pool divides what it is given in place
        scales = () if hasattr(kv_pool, "kv_lora_rank") else (layer.k_scale, layer.v_scale)
        kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v, *scales)
    # Scores are linear in K, the result is in V.
    return original(backend, q * k_scale, k, v, layer, batch, False, **kwargs) * v_scale
