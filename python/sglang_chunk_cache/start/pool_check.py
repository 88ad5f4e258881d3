"""Checks the KV pool that a scheduler has: a checkpoint may ask for another one than the flags.

Verbs: `check_pool` (layout and number format), `check_pool_dtype` (the format alone), `check_scales` (of an FP8 pool).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from sgl_kernel_ext.backend import FP8
from sglang_chunk_cache.flags.server_args import refuse
from sglang_chunk_cache.kv.layer_kv import attention_pool, is_latent, kv_scales

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

POOL_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NOT_READ = {"fa3": ("float8_e5m2",), "fa4": ("float8_e4m3fn", "float8_e5m2"), "trtllm_mha": ("float8_e5m2",)}
"""Number formats that a backend of SGLang cannot prefill from, although SGLang lets a server start with them."""


def check_pool(kv_pool: Any, backends: Collection[str] = ()) -> None:
    """Checks that a KV pool is one tensor `[num_slots, num_heads, head_dim]` per layer, in a format that we can move.

    With latent attention (MLA) it is one row per token and layer instead.

    Args:
        backends: SGLang's, for prefill and for decoding.

    Raises:
        StartRefused: it is not.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    kv_pool = attention_pool(kv_pool)
    layout = getattr(kv_pool, "kv_cache_layout", None)
    is_by_head = isinstance(kv_pool, MHATokenToKVPool) and layout == "nhd"
    if not is_by_head and type(kv_pool) is not MLATokenToKVPool:
        refuse(
            f"the KV cache is a {type(kv_pool).__name__} of the layout {layout}, and --chunk-cache needs a "
            "MHATokenToKVPool of the layout nhd or a MLATokenToKVPool; drop the flag or the variable that changes "
            "SGLang's default."
        )
    is_packed = getattr(kv_pool, "is_quantized_kv_cache", False)
    check_pool_dtype("packed integers" if is_packed else str(kv_pool.dtype).removeprefix("torch."), backends)


def check_pool_dtype(dtype: str, backends: Collection[str] = ()) -> None:
    """Checks the number format of a KV pool, as torch names it; `backends` as of `check_pool`.

    Raises:
        StartRefused: it is not one of `POOL_DTYPES`, or a backend does not read it.
    """
    if dtype not in POOL_DTYPES:
        refuse(f"the KV cache holds {dtype}, which --chunk-cache cannot move; add --kv-cache-dtype bf16.")
    for backend in backends:
        if dtype in NOT_READ.get(backend, ()):
            refuse(
                f"the KV cache holds {dtype}, which SGLang's attention backend {backend} does not read, so it cannot "
                "serve --chunk-cache; name another with --attention-backend, or add --kv-cache-dtype bf16."
            )


def check_scales(kv_pool: Any, layers: Iterable[RadixAttention], backends: Collection[str]) -> None:
    """Checks that SGLang multiplies K and V stored in FP8 by the scales that they were divided by.

    Raises:
        StartRefused: it is not.
    """
    if kv_pool.dtype not in FP8:
        return
    if any(layer.k_scale is not None and layer.k_scale_float is None for layer in layers):
        refuse(
            "--quantization-param-path names scales of the KV cache that SGLang's attention backends do not read, and "
            "--chunk-cache needs them read; drop it."
        )
    if all(kv_scales(kv_pool, layer) == (1.0, 1.0) for layer in layers):
        return
    problem = None
    if is_latent(kv_pool):
        problem = "latent attention (MLA) does not store with scales"
    elif "torch_native" in backends and kv_pool.device != "cpu":
        problem = "SGLang's attention backend torch_native does not read scales"
    if problem is not None:
        refuse(
            f"the checkpoint has scales of its KV cache, but {problem}, and --chunk-cache needs both; add "
            "--kv-cache-dtype bf16."
        )
