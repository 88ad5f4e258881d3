"""LayerKV: K and V of one layer as SGLang's pool holds them, and what they are to be multiplied with.

Verbs: `LayerKV.of` (views, nothing is copied), `write_kv` (rows), `kv_buffers` (all layers).

A pool of FP8 holds K and V divided by a scale per layer, which comes with the checkpoint. Its memory is bytes to torch,
which cannot write to FP8 by index; each view here has the pool's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kernel_ext.backend import FP8

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True)
class LayerKV:
    """See the head of this file.

    Attributes:
        k, v: `[num_slots, num_kv_heads, head_dim]` of this layer.
        k_scale, v_scale: K and V are these times what is stored.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @classmethod
    def of(cls, kv_pool: Any, layer: RadixAttention) -> LayerKV:
        k, v = kv_pool.get_key_buffer(layer.layer_id), kv_pool.get_value_buffer(layer.layer_id)
        return cls(k, v, *kv_scales(kv_pool, layer))

    def keys(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[n, num_kv_heads, head_dim]` a copy of K at `slots`, scaled."""
        keys = self.k[slots].to(dtype)
        return keys if self.k_scale == 1.0 else keys.mul_(self.k_scale)


def kv_scales(kv_pool: Any, layer: RadixAttention) -> tuple[float, float]:
    """What SGLang's backends multiply K and V of a layer with."""
    if kv_pool.dtype not in FP8:
        return 1.0, 1.0
    k_scale, v_scale = layer.k_scale_float, layer.v_scale_float
    return 1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale


def write_kv(kv_pool: Any, layer: RadixAttention, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes K and V `[num_rows, num_kv_heads, head_dim]` of rows into their `slots`; `k` and `v` stay as they are.

    All rows are written before any attends, since a row reads what rows in front of it wrote.
    """
    if k.dtype != kv_pool.dtype:  # such a pool scales what it is given in place, and some backends attend from it
        k, v = k.clone(), v.clone()
    scales = () if is_latent(kv_pool) else (layer.k_scale, layer.v_scale)
    kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v, *scales)


def is_latent(kv_pool: Any) -> bool:
    """Whether a pool holds one row per token and layer, of which K and V of all heads are made (MLA)."""
    return hasattr(attention_pool(kv_pool), "kv_lora_rank")


def attention_pool(kv_pool: Any) -> Any:
    """The pool of the layers that attend; in a model with states it is part of a larger one."""
    return kv_pool.full_kv_pool if hasattr(kv_pool, "mamba_pool") else kv_pool


def kv_buffers(kv_pool: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a KV pool holds per layer, as views: what is rotated, `[num_slots, heads, dim]`, and what is not.

    With latent attention (MLA), a row is a latent vector with the rotated dimensions behind it: "K" is these dimensions
    and "V" the vector.
    """
    kv_pool = attention_pool(kv_pool)
    if is_latent(kv_pool):
        rows, rank = _typed(kv_pool, kv_pool.kv_buffer), kv_pool.kv_lora_rank
        return [row[..., rank:] for row in rows], [row[..., :rank] for row in rows]
    return _typed(kv_pool, kv_pool.k_buffer), _typed(kv_pool, kv_pool.v_buffer)


def _typed(kv_pool: Any, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [buffer.view(kv_pool.dtype) for buffer in buffers]
