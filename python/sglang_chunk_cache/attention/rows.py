"""FusedRows: the rows of one fused forward, and the attention that serves them.

Verbs: `FusedRows.build` (once per forward), `attend_rows` (scope of a forward), `backend_forward` (the handler).

Promises: inside the scope all requests of the batch, fused and plain, go through one call of `sparse_extend` per layer,
in which a row attends to every position up to its own; outside of it, nothing is different from stock SGLang. K and V
of the rows are written before any row reads, as in every backend of SGLang.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kernel_ext.sparse_extend import sparse_extend
from sglang_chunk_cache.server_args import get_args

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class FusedRows:
    """Index tensors of one forward, built once for all layers.

    Attributes:
        kv_indptr: `[num_reqs + 1]`; keys of request i are `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`. A list on the
            CPU; int64 on a GPU, so that no layer copies it there.
        kv_indices: int64 slots of all positions of all requests, in order, on the device.
        row_indptr: `[num_reqs + 1]` into the rows, like `kv_indptr`.
        row_positions: `[num_rows]` int64, ascending within a request, on the device.
        kv_pool: SGLang's KV pool.
        kernel: backend of `sparse_extend`.
    """

    kv_indptr: list[int] | torch.Tensor
    kv_indices: torch.Tensor
    row_indptr: list[int] | torch.Tensor
    row_positions: torch.Tensor
    kv_pool: Any
    kernel: str

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
    ) -> FusedRows:
        """See the attributes; `req_to_token` is `[max_reqs, max_context_len]`, lengths are per request."""
        rows = [req_to_token[index, :kv_len] for index, kv_len in zip(req_pool_indices, kv_lens, strict=True)]
        args = get_args()
        return cls(
            kv_indptr=_indptr(kv_lens, row_positions.device),
            kv_indices=torch.cat(rows).to(torch.int64),
            row_indptr=_indptr(row_lens, row_positions.device),
            row_positions=row_positions,
            kv_pool=kv_pool,
            kernel="auto" if args is None else args.config.get("kernel", "auto"),
        )


def _indptr(lens: list[int], device: torch.device) -> list[int] | torch.Tensor:
    indptr = [0, *itertools.accumulate(lens)]
    return indptr if device.type == "cpu" else torch.tensor(indptr, dtype=torch.int64, device=device)


_current: FusedRows | None = None  # one forward at a time runs in a scheduler process


@contextlib.contextmanager
def attend_rows(rows: FusedRows) -> Iterator[None]:
    """Forwards inside the scope attend by `rows`."""
    global _current
    assert _current is None, "forwards do not nest"
    _current = rows
    try:
        yield
    finally:
        _current = None


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
    rows = _current
    if rows is None:
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    pool = rows.kv_pool
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
    out = sparse_extend(
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        rows.kv_indptr,
        rows.kv_indices,
        rows.row_indptr,
        rows.row_positions,
        sm_scale=layer.scaling,
        logit_cap=layer.logit_cap,
        backend=rows.kernel,
    )
    return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
