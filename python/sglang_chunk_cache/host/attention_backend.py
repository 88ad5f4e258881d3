"""What is wrapped of `AttentionBackend`: inside the scope of a forward, something else attends in its place.

Verbs: `attending` (scope of a forward), `forward` (the handler).

Promise: outside of the scope nothing is different from stock SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_chunk_cache.kv.statistics_taker import StatisticsTaker
    from sglang_chunk_cache.tiers.landing import LayerLoads


class Attention(Protocol):
    """What attends in the place of SGLang's backend: `FusedRows`, or a forward in which rows leave."""

    @property
    def row_positions(self) -> torch.Tensor: ...

    @property
    def row_lens(self) -> list[int]: ...

    @property
    def is_asking(self) -> bool:
        """Whether this pass only scores: what it computes is computed again."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor: ...


# One forward at a time runs in a scheduler process.
_current: Attention | None = None
_observer: StatisticsTaker | None = None
_loads: LayerLoads | None = None


@contextlib.contextmanager
def attending(
    attention: Attention | None, observer: StatisticsTaker | None, loads: LayerLoads | None = None
) -> Iterator[None]:
    """Forwards inside the scope attend by `attention` (None: as in stock SGLang), and `observer` looks on.

    Args:
        loads: KV that must be in place before a layer attends.
    """
    global _current, _observer, _loads
    assert _current is None, "forwards do not nest"
    assert _observer is None, "forwards do not nest"
    _current, _observer, _loads = attention, observer, loads
    try:
        yield
    finally:
        _current = _observer = _loads = None


def forward(
    original: Callable[..., torch.Tensor],
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """AROUND `AttentionBackend.forward`."""
    if _loads is not None:
        _loads.arrive(layer.layer_id)
    is_observed = _observer is not None and _observer.observes(layer.layer_id)
    if _current is None:
        positions, row_lens = forward_batch.positions, forward_batch.extend_seq_lens_cpu
        out = original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    else:
        is_observed = is_observed and not _current.is_asking
        positions, row_lens = _current.row_positions, _current.row_lens  # rows may leave inside
        out = _current.attend(q, k, v, layer, forward_batch, save_kv_cache)
    if is_observed:
        assert _observer is not None
        _observer.observe(layer, q, positions, row_lens)
    return out
