"""Scales of an FP8 KV cache on `torch_native`, which stores and reads K and V as if they had none.

Verb: `install` (once per process). Where scales are 1, which they are unless a checkpoint has others, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def install() -> None:
    """From here on K and V are divided by the scales of their layer when they are stored, as in SGLang's others."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("forward_extend", "forward_decode"):
        original = getattr(TorchNativeAttnBackend, name)
        if not hasattr(original, "__wrapped__"):
            setattr(TorchNativeAttnBackend, name, _scaled(original))


def _scaled(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def forward(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        from sglang_chunk_cache.kv.layer_kv import kv_scales, write_kv

        k_scale, v_scale = kv_scales(backend.token_to_kv_pool, layer)
        if (k_scale, v_scale) == (1.0, 1.0):
            return original(backend, q, k, v, layer, batch, save_kv_cache, **kwargs)
        if save_kv_cache and k is not None:
            write_kv(backend.token_to_kv_pool, layer, batch.out_cache_loc, k, v)
        # Scores are linear in K, the result is in V.
        return original(backend, q * k_scale, k, v, layer, batch, False, **kwargs) * v_scale

    return forward
