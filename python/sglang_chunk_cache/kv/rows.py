"""FusedRows: the rows of one fused forward, and the attention that serves them.

Verbs: `FusedRows.build` (once per forward), `with_rows` (the same requests with other rows), `attend` (one layer),
`attending` (scope of a forward), `backend_forward` (the handler).

Promises: inside the scope all requests of the batch, fused and plain, go through one call of `sparse_extend` per layer,
in which a row attends to every position up to its own; outside of it, nothing is different from stock SGLang. K and V
of the rows are written before any row reads, as in every backend of SGLang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kernel_ext.sparse_extend import sparse_extend

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_chunk_cache.kv.statistics_taker import StatisticsTaker
    from sglang_chunk_cache.tiers.landing import LayerLoads


@dataclass(frozen=True)
class FusedRows:
    """Index tensors of one forward, built once for all layers.

    Attributes:
        kv_indptr: `[num_reqs + 1]`; keys of request i are `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`. A list on the
            CPU and for FlashInfer, which plans on the host; otherwise int64 on the GPU, so that no layer copies it.
        kv_indices: int64 slots of all positions of all requests, in order, on the device.
        row_indptr: `[num_reqs + 1]` into the rows, like `kv_indptr`.
        row_positions: `[num_rows]` int64, ascending within a request, on the device.
        kv_lens, row_lens: `[num_reqs]`, on the host.
        kv_pool: SGLang's KV pool.
        kernel: backend of the operations.
    """

    kv_indptr: list[int] | torch.Tensor
    kv_indices: torch.Tensor
    row_indptr: list[int] | torch.Tensor
    row_positions: torch.Tensor
    kv_lens: list[int]
    row_lens: list[int]
    kv_pool: Any
    kernel: str
    is_asking: ClassVar[bool] = False

    @classmethod
    def build(
        cls,
        *,
        req_to_token: torch.Tensor,
        req_pool_indices: list[int],
        kv_lens: list[int],
        row_lens: list[int],
        row_positions: torch.Tensor,
        kv_pool: Any,
        kernel: str,
    ) -> FusedRows:
        """See the attributes; `req_to_token` is `[max_reqs, max_context_len]`, lengths are per request."""
        rows = [req_to_token[index, :kv_len] for index, kv_len in zip(req_pool_indices, kv_lens, strict=True)]
        return cls(
            kv_indptr=_indptr(kv_lens, row_positions.device, kernel),
            kv_indices=torch.cat(rows).to(torch.int64),
            row_indptr=_indptr(row_lens, row_positions.device, kernel),
            row_positions=row_positions,
            kv_lens=kv_lens,
            row_lens=row_lens,
            kv_pool=kv_pool,
            kernel=kernel,
        )

    def with_rows(self, row_positions: torch.Tensor, row_lens: list[int]) -> FusedRows:
        """The same requests with other rows; arguments as in `build`."""
        row_indptr = _indptr(row_lens, row_positions.device, self.kernel)
        return dataclasses.replace(self, row_indptr=row_indptr, row_positions=row_positions, row_lens=row_lens)

    def slots_of(self, i: int) -> torch.Tensor:
        """`[kv_len]` int64, the slots of request i."""
        begin = sum(self.kv_lens[:i])
        return self.kv_indices[begin : begin + self.kv_lens[i]]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Writes K and V of the rows and attends; `[num_rows, num_q_heads * v_head_dim]`."""
        pool = self.kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        out = sparse_extend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.kv_indptr,
            self.kv_indices,
            self.row_indptr,
            self.row_positions,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            backend=self.kernel,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _indptr(lens: list[int], device: torch.device, kernel: str) -> list[int] | torch.Tensor:
    indptr = [0, *itertools.accumulate(lens)]
    if device.type == "cpu" or kernel == "flashinfer":
        return indptr
    return torch.tensor(indptr, dtype=torch.int64, device=device)


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


def backend_forward(
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
