"""FusedRows: the rows of one fused forward, and an attention for rows at any positions.

Verbs: `FusedRows.build` (once per forward), `with_rows` (the same requests with other rows), `attend` (one layer).

Promises: except for requests that SGLang's backend serves `beside`, all requests of the batch go through one call of
`SparseExtend` per layer, in which a row attends to every position up to its own. K and V of the rows are written before
any row reads, as in every backend of SGLang.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sgl_kernel_ext.sparse_extend import SparseExtend
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.runs import StockServedRequests
from sglang_chunk_cache.forward.whole_rows import whole_rows
from sglang_chunk_cache.kv.layer_kv import LayerKV, write_kv

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass
class FusedRows:
    """Index tensors of one forward, built once for all layers.

    Attributes:
        kv_indices: int64 slots of all positions of all requests, in order, on the device.
        row_positions: `[num_rows]` int64, ascending within a request, on the device.
        kv_lens, row_lens: `[num_reqs]`, on the host.
        kv_pool: SGLang's KV pool.
        kernel: backend of the operations.
        beside: requests that SGLang's backend serves; None = none.
    """

    kv_indices: torch.Tensor
    row_positions: torch.Tensor
    kv_lens: list[int]
    row_lens: list[int]
    kv_pool: Any
    kernel: str
    beside: StockServedRequests | None = None

    def __post_init__(self) -> None:
        own_lens, own_positions = self.row_lens, self.row_positions
        if self.beside is not None:
            own_lens = [
                0 if served else length for served, length in zip(self.beside.are_served, own_lens, strict=True)
            ]
            own_positions = self._taken(own_positions, are_served=False)
        indptrs = [np.cumsum([0, *lens], dtype=np.int64) for lens in (self.kv_lens, own_lens)]
        # On the CPU and for FlashInfer the host reads them; otherwise they are uploaded once, not by every layer.
        on_host = self.row_positions.device.type == "cpu" or self.kernel.startswith("flashinfer")
        kv_indptr, row_indptr = (
            [one.tolist() for one in indptrs] if on_host else upload(indptrs, self.row_positions.device)
        )
        self._attention = SparseExtend(kv_indptr, self.kv_indices, row_indptr, own_positions, backend=self.kernel)

    @classmethod
    def build(
        cls,
        *,
        req_to_token: torch.Tensor,
        req_pool_indices: Sequence[int],
        kv_lens: list[int],
        row_lens: list[int],
        row_positions: torch.Tensor,
        kv_pool: Any,
        kernel: str,
        beside: StockServedRequests | None = None,
    ) -> FusedRows:
        """See the attributes; `req_to_token` is `[max_reqs, max_context_len]`, lengths are per request."""
        lens = np.asarray(kv_lens, dtype=np.int64)
        # Slot j of all requests stands at flat index first[request of j] + j of `req_to_token`.
        first = np.asarray(req_pool_indices, dtype=np.int64) * req_to_token.shape[1] - (np.cumsum(lens) - lens)
        device, total = row_positions.device, int(lens.sum())
        first_on_device, lens_on_device = upload((first, lens), device)
        places = first_on_device.repeat_interleave(lens_on_device, output_size=total)
        places += torch.arange(total, device=device)
        kv_indices = req_to_token.view(-1).index_select(0, places).to(torch.int64)
        return cls(kv_indices, row_positions, kv_lens, row_lens, kv_pool, kernel, beside)

    def with_rows(self, row_positions: torch.Tensor, row_lens: list[int]) -> FusedRows:
        """The same requests with other rows, except those that SGLang's backend serves; arguments as in `build`."""
        return dataclasses.replace(self, row_positions=row_positions, row_lens=row_lens)

    def slots_of(self, i: int) -> torch.Tensor:
        """`[kv_len]` int64, the slots of request i."""
        begin = sum(self.kv_lens[:i])
        return self.kv_indices[begin : begin + self.kv_lens[i]]

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch | None:
        """What SGLang's backend sees of `batch`; None where it does not attend."""
        return None if self.beside is None else self.beside.runs.for_metadata(batch)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
        **parts: Any,
    ) -> torch.Tensor:
        """Writes K and V of the rows and attends: `[num_rows, num_q_heads * v_head_dim]`; `parts`: see `whole_rows`."""
        q, k = whole_rows(q, k, layer, parts)
        sinks = parts.get("sinks")
        if save_kv_cache and k is not None:
            write_kv(self.kv_pool, layer, batch.out_cache_loc[: len(k)], k, v)
        if self.beside is None or not any(itertools.compress(self.row_lens, self.beside.are_served)):
            return self._attend_own(q, layer, sinks)
        view = copy.copy(batch)
        view.out_cache_loc = self.beside.slots  # by which some backends read the rows' K
        view._attn_output = None  # in a graph, it has room for all rows
        q = q.reshape(len(q), -1)  # as a model gives it to its backend
        their_k, their_v = (None if one is None else self._taken(one, are_served=True) for one in (k, v))
        their_q = self._taken(q, are_served=True)
        given = {} if sinks is None else {"sinks": sinks}  # not every backend has the argument
        theirs = self.beside.runs.attend(their_q, their_k, their_v, layer, view, save_kv_cache=False, **given)
        return self._joined(theirs, self._attend_own(self._taken(q, are_served=False), layer, sinks))

    def finish(self) -> None:
        """Frees what the kernel has made of the index tensors; the forward has ended."""
        self._attention.forget()

    def _attend_own(self, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None) -> torch.Tensor:
        kv = LayerKV.of(self.kv_pool, layer)
        out = self._attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            kv.k,
            kv.v,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            window=layer.sliding_window_size,
            sinks=sinks,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _taken(self, rows: torch.Tensor, are_served: bool) -> torch.Tensor:
        """The rows of the requests that SGLang's backend serves, or those of the others."""
        assert self.beside is not None
        pairs = zip(rows.split(self.row_lens), self.beside.are_served, strict=True)
        return torch.cat([piece for piece, is_served in pairs if is_served == are_served])

    def _joined(self, served: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """All rows in order, from the two parts that `_taken` made."""
        assert self.beside is not None
        rows, begins = (own, served), [0, 0]
        pieces = []
        for length, is_served in zip(self.row_lens, self.beside.are_served, strict=True):
            begin = begins[is_served]
            begins[is_served] += length
            pieces.append(rows[is_served][begin : begin + length])
        return torch.cat(pieces)
