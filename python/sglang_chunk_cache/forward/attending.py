"""Patches SGLang's attention backend for one forward, so that something else attends in its place or looks on.

Verbs: `attending` (scope of a forward), `attending_now` (what attends and looks on inside of it).

Promise: outside of the scope the backend is SGLang's own; within it, it is still the same object, of the same class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.forward.whole_rows import whole_rows, write_rows
from sglang_chunk_cache.kv.partial_load import LayerLoads

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


_SCOPE = "chunk_cache_scope"
"""Attribute of the backend within the scope: what attends and what looks on."""


class _Ended(Exception):
    """Ends a forward at the last layer that is wanted, on every rank."""


class Attention(Protocol):
    """What attends in a fused forward: `BackendRuns`, `FusedRows` or `LayerwiseForward`."""

    @property
    def row_positions(self) -> torch.Tensor: ...

    @property
    def row_lens(self) -> list[int]: ...

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch | None:
        """The batch for which the backend prepares its metadata; None: it does not attend, so it prepares none."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
        **parts: Any,
    ) -> torch.Tensor: ...

    def finish(self) -> None:
        """Frees what was made of the forward's rows for all layers; the forward has ended."""


@dataclass(frozen=True)
class ObservedRows:
    """Rows of a batch at one layer, whose K is in its slots.

    Attributes:
        q: `[num_rows, num_q_heads * head_dim]` of the batch.
        positions: `[num_rows]` int64.
        row_lens: rows of each request.
        sinks: `[num_q_heads]` of the layer's attention; None = it has none.
    """

    layer: RadixAttention
    q: torch.Tensor
    positions: torch.Tensor
    row_lens: Sequence[int]
    sinks: torch.Tensor | None = None


class Observer(Protocol):
    """What looks on in a forward, without changing its result."""

    def observes(self, layer_id: int) -> bool:
        """Whether it looks at this layer."""

    def observe(self, seen: ObservedRows) -> None:
        """Looks at one layer."""

    def finish(self) -> None:
        """The forward has ended."""


@contextlib.contextmanager
def attending(
    backend: AttentionBackend,
    attention: Attention | None,
    observers: Sequence[Observer] = (),
    loads: LayerLoads | None = None,
    stock_positions: torch.Tensor | None = None,
    states: StateForward | None = None,
    last_layer: int | None = None,
) -> Iterator[None]:
    """Forwards inside the scope attend by `attention` (None: as in stock SGLang), and `observers` look on.

    Args:
        backend: the one that the forwards call.
        loads: KV that must be in place before a layer attends.
        stock_positions: `[num_tokens]` for observers, where `attention` is None.
        states: what layers with states do; None = as in stock SGLang.
        last_layer: the layer at which the scope ends: its K and V are written, but nobody attends; None = all layers.
    """
    assert "forward" not in vars(backend), "forwards do not nest"
    stock_forward, stock_metadata = backend.forward, backend.init_forward_metadata

    def forward(
        q: Any = None,
        k: Any = None,
        v: Any = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if "mixed_qkv" in kwargs:  # a layer with states
            compute = stock_forward if states is None else partial(states.forward, stock_forward)
            return compute(layer=layer, forward_batch=forward_batch, **kwargs)
        if loads is not None:
            loads.arrive(layer.layer_id)
        if attention is None:
            positions, row_lens = stock_positions, forward_batch.extend_seq_lens_cpu
            out = stock_forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        else:
            positions, row_lens = attention.row_positions, attention.row_lens
            if layer.layer_id != last_layer:
                out = attention.attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # rows may leave inside
            elif save_kv_cache and k is not None:
                write_rows(backend.token_to_kv_pool, q, k, v, layer, forward_batch, kwargs)
        looking = [one for one in observers if one.observes(layer.layer_id)]
        if looking:
            whole_q, _ = whole_rows(q, None, layer, {"q_rope": kwargs.get("q_rope")})
            seen = ObservedRows(layer, whole_q, positions, row_lens, kwargs.get("sinks"))
            for one in looking:
                one.observe(seen)
        if layer.layer_id == last_layer:
            raise _Ended
        return out

    def init_forward_metadata(forward_batch: ForwardBatch) -> None:
        batch = forward_batch if attention is None else attention.for_metadata(forward_batch)
        if batch is not None:
            stock_metadata(batch if states is None else states.for_metadata(batch))
        if states is not None:
            states.set_up(forward_batch, is_prepared=batch is not None)

    backend.forward, backend.init_forward_metadata = forward, init_forward_metadata
    setattr(backend, _SCOPE, (attention, observers))
    try:
        yield
    except _Ended:
        pass
    finally:
        del backend.forward, backend.init_forward_metadata
        delattr(backend, _SCOPE)
        if attention is not None:
            attention.finish()
        if states is not None:
            states.finish()


def attending_now(backend: AttentionBackend) -> tuple[Attention | None, Sequence[Observer]]:
    """What attends in the place of `backend` (None: nothing does), and what looks on."""
    return getattr(backend, _SCOPE, (None, ()))
