"""Q and K of rows in one piece: models with latent attention hand over the rotated dimensions apart.

Verbs: `whole_rows`, `write_rows` (K and V into the pool).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_chunk_cache.kv.layer_kv import write_kv

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


_KNOWN = ("q_rope", "k_rope", "sinks")


class AttentionNotServed(ValueError):
    """A model's attention takes something that rows do not support; the text says what."""


def whole_rows(
    q: torch.Tensor, k: torch.Tensor | None, layer: RadixAttention, parts: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Q and K of all dimensions; latent attention hands over the rotated ones apart, in `parts`.

    Raises:
        AttentionNotServed: there is something else in `parts`.
    """
    others = sorted(name for name, value in parts.items() if value is not None and name not in _KNOWN)
    if others:
        raise AttentionNotServed(f"its attention takes {', '.join(others)}")
    if parts.get("q_rope") is not None:
        q = torch.cat([_by_head(q, layer.tp_q_head_num), _by_head(parts["q_rope"], layer.tp_q_head_num)], -1)
    if parts.get("k_rope") is not None and k is not None:
        k = torch.cat([_by_head(k, layer.tp_k_head_num), _by_head(parts["k_rope"], layer.tp_k_head_num)], -1)
    return q, k


def write_rows(
    kv_pool: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    batch: ForwardBatch,
    parts: dict[str, Any],
) -> None:
    """Writes K and V of the rows of `batch` into its slots; `parts` as of `whole_rows`."""
    whole_k = whole_rows(q, k, layer, {"k_rope": parts.get("k_rope")})[1]
    assert whole_k is not None
    write_kv(kv_pool, layer, batch.out_cache_loc[: len(k)], whole_k, v)


def _by_head(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    return rows.reshape(len(rows), num_heads, -1)
