"""LayerwiseForward: one forward in which rows leave between layers, or reused K and V are corrected.

Verbs: `attend` (called by every attention layer), `run` (scope of a forward in which rows leave: the decoder carries
hooks).

How rows leave without the model knowing: the attention of a layer gets Q, K and V of all rows and attends for those
that are left. If the residual stream stands beside the layer, it is cut at once, and what follows in the layer works on
what it is given. If it is a variable within the layer, rows that have left get an output of zeros, and what the layer
returns is cut. A hook cuts what else the model gives to the next layers, such as positions.

Promises: nothing of it outlives the forward; the model's code is not replaced; on a GPU the host waits only for what
grouping or focus has decided at the layer before (see `progress`), and where SGLang's backend itself waits, if it
serves requests beside.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.selection.drift import DriftCorrection
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer
from sglang_chunk_cache.forward.whole_rows import AttentionNotServed, whole_rows
from sglang_chunk_cache.kv.layer_kv import LayerKV, is_latent
from sglang_chunk_cache.kv.model_layers import ModelLayers, cut_residual, cut_rows

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class _LateCut:
    """Rows that have left within a layer, although the rest of the layer still computes all rows it was given.

    Attributes:
        index: rows that are left, of the `num_rows` that the layer was given.
        gone: number of rows that have left, per request.
    """

    batch: ForwardBatch
    index: torch.Tensor
    num_rows: int
    gone: list[int]


class LayerwiseForward:
    """See the head of this file.

    Args:
        rows: that the forward begins with.
        requests: one per request of the batch.
        layers: of the model.
        tp_size: ranks among which the heads are divided.
        lora_manager: SGLang's, whose segments are those of the rows that are left; None = without adapters.
    """

    def __init__(
        self,
        rows: FusedRows,
        requests: Sequence[RequestProgress],
        layers: ModelLayers,
        tp_size: int,
        lora_manager: LoRAManager | None,
    ) -> None:
        self._rows = rows
        self._requests = requests
        self._layers = layers
        self._tp_size = tp_size
        self._lora_manager = lora_manager
        self.rows_leave = any(request.rows_leave for request in requests)
        corrected = [request.corrected(i, rows.slots_of(i)) for i, request in enumerate(requests) if request.corrects]
        self._corrections = DriftCorrection.of(corrected, rows.kernel)
        self._corrected: FusedRows | None = None
        self._num_given = len(rows.row_positions)
        self._left: torch.Tensor | None = None  # of the rows that the model was given; None = all
        self._cut_later: _LateCut | None = None
        self._image_features: torch.Tensor | None = None

    @property
    def row_positions(self) -> torch.Tensor:
        """`[num_rows]` int64 of the rows that are left."""
        return self._rows.row_positions

    @property
    def row_lens(self) -> list[int]:
        """Rows that are left of each request."""
        return self._rows.row_lens

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Has the decoder of the model run with this selection inside the scope."""
        handles = []
        for layer in self._layers.modules:
            handles.append(layer.register_forward_pre_hook(self._before_layer, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._behind_layer))
        handles.append(self._layers.decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_decoder(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(decoder.forward).bind(*args, **kwargs).arguments
        known = (*_GIVEN, _IMAGE_FEATURES)
        others = [name for name, value in given.items() if name not in known and _has_rows(value, self._num_given)]
        if others:
            raise AttentionNotServed(f"its decoder is given {', '.join(others)} of every token")
        self._image_features = given.get(_IMAGE_FEATURES)

    # The layers.

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch | None:
        """See `FusedRows.for_metadata`."""
        return self._rows.for_metadata(batch)

    def finish(self) -> None:
        """See `FusedRows.finish`."""
        self._rows.finish()

    def _before_layer(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._left is None:
            return None
        # Positions, and what a model makes of them once for all layers.
        return cut_rows(args, self._left, self._num_given), cut_rows(kwargs, self._left, self._num_given)

    def _behind_layer(self, layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        cut, self._cut_later = self._cut_later, None
        if cut is None:
            return None
        _set_lengths(cut.batch, self.row_lens, cut.gone, self._lora_manager)
        return cut_rows(output, cut.index, cut.num_rows)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
        **parts: Any,
    ) -> torch.Tensor:
        """Attention of one layer over the rows that are left; `parts` as of `whole_rows`."""
        if k is not None and not save_kv_cache:
            raise AttentionNotServed("its layers write K and V before they attend")
        q, k = whole_rows(q, k, layer, parts)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        sinks = parts.get("sinks")
        layer_id = layer.layer_id
        began = time.perf_counter()
        q, k, v = self._cut(q, k, v, batch, [request.leave(layer_id) for request in self._requests])
        chosen: list[torch.Tensor | None] = []
        for i, request in enumerate(self._requests):
            selects = request.selects_at(layer_id)
            chosen.append(request.select(layer_id, self._rows_at(i, q, k, v, layer, sinks)) if selects else None)
        q, k, v = self._cut(q, k, v, batch, chosen)
        if self._corrections and self._corrected is not self._rows:  # other rows than at the layer before
            self._corrected, begins = self._rows, np.cumsum([0, *self.row_lens]).tolist()
            for correction in self._corrections:
                correction.follow([self._requests[i].left_rows(begins[i]) for i in correction.requests])
        for correction in self._corrections:
            stored, rotary = LayerKV.of(self._rows.kv_pool, layer), self._layers.rotaries[layer_id]
            # With latent attention the leading dimensions of a key are V, and not rotated.
            num_unrotated = layer.v_head_dim if is_latent(self._rows.kv_pool) else 0
            correction.apply(k, v, stored, rotary, num_unrotated)
        for i, request in enumerate(self._requests):
            if request.observes:
                request.observe(layer_id, self._rows_at(i, q, k, v, layer, sinks))
            request.finish_layer()
        seconds = time.perf_counter() - began
        for request in self._requests:
            request.count_seconds(seconds)
        out = self._rows.attend(q, k, v, layer, batch, save_kv_cache, sinks=sinks)
        cut = self._cut_later
        return out if cut is None else out.new_zeros(cut.num_rows, out.shape[1]).index_copy_(0, cut.index, out)

    def _rows_at(
        self,
        i: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        sinks: torch.Tensor | None,
    ) -> RowsAtLayer:
        begin, pool = sum(self.row_lens[:i]), self._rows.kv_pool
        rows = slice(begin, begin + self.row_lens[i])
        return RowsAtLayer(
            q=q[rows],
            k=k[rows],
            v=v[rows],
            positions=self.row_positions[rows],
            num_question=self._requests[i].num_question,
            num_answer=self._requests[i].num_answer,
            kv_slots=self._rows.slots_of(i),
            stored=LayerKV.of(pool, layer),
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            tp_size=self._tp_size,
            sinks=sinks,
            options=self._requests[i].options,
            kernel=self._rows.kernel,
        )

    def _cut(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        left: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V of the rows that are left; cuts the batch and the residual stream to these rows, too."""
        if all(index is None for index in left):
            return q, k, v
        pieces, begin = [], 0
        for length, index in zip(self.row_lens, left, strict=True):
            pieces.append(torch.arange(begin, begin + length, device=q.device) if index is None else index + begin)
            begin += length
        index = torch.cat(pieces)
        lens = [len(piece) for piece in pieces]
        gone = [old - new for old, new in zip(self.row_lens, lens, strict=True)]
        earlier = self._cut_later
        if earlier is not None:  # rows left in this layer already
            gone = [before + now for before, now in zip(earlier.gone, gone, strict=True)]
            self._cut_later = _LateCut(batch, earlier.index[index], earlier.num_rows, gone)
        elif cut_residual(batch, index):
            _set_lengths(batch, lens, gone, self._lora_manager)
        else:
            self._cut_later = _LateCut(batch, index, len(q), gone)
        batch.input_ids, batch.out_cache_loc = batch.input_ids[index], batch.out_cache_loc[index]
        if self._image_features is not None:  # the decoder goes on with the same tensor
            self._image_features.data = self._image_features[index]
        self._left = index if self._left is None else self._left[index]
        self._rows = self._rows.with_rows(self.row_positions[index], lens)
        batch.positions = self.row_positions.to(batch.positions.dtype)
        return q[index], k[index], v[index]


_GIVEN = ("input_ids", "positions", "forward_batch", "input_embeds", "inputs_embeds")
_IMAGE_FEATURES = "input_deepstack_embeds"
"""What Qwen3-VL adds to the rows of an image between its first layers, and nothing to those of a text."""


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == num_rows


def divide_adapters(lora_manager: LoRAManager | None, batch: ForwardBatch) -> None:
    """Has each row of `batch` computed with the adapter of its request; SGLang's division is of the newest batch."""
    if lora_manager is not None:
        lora_manager.prepare_lora_batch(batch)


def _set_lengths(batch: ForwardBatch, row_lens: list[int], cut: list[int], lora_manager: LoRAManager | None) -> None:
    """Makes all lengths of `batch` those of `row_lens`; `cut` rows are gone from the front of each request."""
    num_rows = sum(row_lens)
    batch.extend_seq_lens_cpu, batch.extend_num_tokens = row_lens, num_rows
    if batch.extend_prefix_lens is not None:
        batch.extend_prefix_lens_cpu = [a + b for a, b in zip(batch.extend_prefix_lens_cpu, cut, strict=True)]
    given = {
        "extend_seq_lens": row_lens,
        "extend_start_loc": np.cumsum([0, *row_lens[:-1]]),
        "extend_prefix_lens": batch.extend_prefix_lens_cpu,
    }
    lengths = {name: np.array(lens, np.int32) for name, lens in given.items() if getattr(batch, name) is not None}
    uploaded = upload(list(lengths.values()), batch.extend_seq_lens.device)
    for name, tensor in zip(lengths, uploaded, strict=True):
        setattr(batch, name, tensor.to(getattr(batch, name).dtype))
    if batch.extend_logprob_start_lens_cpu is not None:
        starts = zip(batch.extend_logprob_start_lens_cpu, cut, strict=True)
        batch.extend_logprob_start_lens_cpu = [start - gone for start, gone in starts]
    for name in ("num_token_non_padded", "global_num_token_non_padded"):
        value = getattr(batch, name)
        if value is not None:
            setattr(batch, name, torch.full_like(value, num_rows))
    if batch.global_num_token_non_padded_cpu is not None:
        batch.global_num_token_non_padded_cpu = num_rows
    divide_adapters(lora_manager, batch)
