"""ModelLayers: what is asked of a model, found by looking at the one that is loaded: where its decoder layers are, how
the keys of each are rotated, and what a layer's attention sees.

Verb: `describe_model`. What it finds is proven by forwards of the model itself when a server starts
(`start/model_check.py`), so classes of models differ in nothing but what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from sgl_kernel_ext.rotary import (
    RotaryMismatchError,
    RotarySpec,
    UnsupportedRotaryError,
    spec_from_sglang_rope,
    table_of,
    verify_spec,
)
from sglang_chunk_cache.flags.server_args import refuse

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class ModelLayers:
    """The decoder layers of a loaded model that attend, in order; in some models others between them keep states.

    Attributes:
        decoder: the module that runs them; called with `(input_ids, positions, batch)`.
        modules: `[num_layers]` decoder layers.
        attentions: `[num_layers]` attention of each, whose `layer_id` is its place among all layers.
        rotaries: `[num_layers]` how the keys of each are rotated, with frequencies on the device of the model; equal
            ones are one object. None: they carry no position.
    """

    decoder: torch.nn.Module
    modules: tuple[torch.nn.Module, ...]
    attentions: tuple[RadixAttention, ...]
    rotaries: tuple[RotarySpec | None, ...]

    @property
    def windows(self) -> tuple[int, ...]:
        """`[num_layers]` positions that a row of each sees in front of its own; -1 = all."""
        return tuple(attention.sliding_window_size for attention in self.attentions)

    @property
    def rotary(self) -> RotarySpec:
        """Rotation of the first layer that has one; a model without any is refused."""
        return next(rotary for rotary in self.rotaries if rotary is not None)


def describe_model(model: torch.nn.Module, context_len: int) -> ModelLayers:
    """The layers of `model`; every rotation is compared with the model's own table of cosines below `context_len`.

    Raises:
        StartRefused: no list of decoder layers with one attention each, no rotation at all, or one that does not turn
            each dimension by a fixed angle per position; the sentence names the layer.
    """
    name, modules = _decoder_layers(model)
    attentions = tuple(_attention_of(layer, i) for i, layer in modules)
    specs: dict[int, RotarySpec] = {}  # by the rotary module: layers share them
    rotaries = tuple(_rotary_of(layer, i, context_len, specs) for i, layer in modules)
    if not specs:
        refuse("the model has no rotary embedding, so its keys cannot be moved to another position.")
    return ModelLayers(model.get_submodule(name), tuple(layer for _, layer in modules), attentions, rotaries)


def _decoder_layers(model: torch.nn.Module) -> tuple[str, tuple[tuple[int, torch.nn.Module], ...]]:
    """Name of the module with the list of layers, and the layers that attend, with their places; others keep states."""
    kinds = (RadixAttention, RadixLinearAttention)
    lists = [
        (name, tuple((i, layer) for i, layer in enumerate(module) if _has(layer, RadixAttention)))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and _has(module, RadixAttention)
        and all(_has(one, kinds) for one in module)
    ]
    if len(lists) != 1:
        refuse(f"{type(model).__name__} has {len(lists)} lists of layers with attention; exactly one is supported.")
    ((name, layers),) = lists
    return name.rpartition(".")[0], layers


def _has(module: torch.nn.Module, kinds: Any) -> bool:
    return any(isinstance(part, kinds) for part in module.modules())


def _attention_of(layer: torch.nn.Module, i: int) -> RadixAttention:
    """The attention of a layer; of the two forms of latent attention, the one that attends from what is stored."""
    found = [part for part in layer.modules() if isinstance(part, RadixAttention)]
    stored = found if len(found) == 1 else [one for one in found if one.tp_k_head_num == 1]
    if len(stored) != 1 or stored[0].layer_id != i:
        refuse(f"layer {i} of the model has {len(found)} attentions; one, numbered like the layer, is supported.")
    return stored[0]


def _rotary_of(layer: torch.nn.Module, i: int, context_len: int, specs: dict[int, RotarySpec]) -> RotarySpec | None:
    found = {id(module): (module, table) for module in layer.modules() if (table := table_of(module)) is not None}
    if not found:
        return None
    if len(found) != 1:
        refuse(f"layer {i} of the model has {len(found)} different rotary embeddings; one is supported.")
    ((key, (rope, table)),) = found.items()
    if key not in specs:
        try:
            spec = spec_from_sglang_rope(rope)
            verify_spec(spec, table, torch.arange(min(context_len, len(table))))
        except (UnsupportedRotaryError, RotaryMismatchError) as error:
            refuse(f"the rotary embedding of layer {i} of the model is not supported: {error}")
        specs[key] = spec.to(table.device)
    return specs[key]


# --- rows that leave --------------------------------------------------------------------------------------------------


def cut_residual(batch: ForwardBatch, index: torch.Tensor) -> bool:
    """Cuts the residual stream to the rows `index`, if it stands beside the layer; returns whether it does."""
    stream = batch.residual_stream
    if stream is None or stream.residual is None or stream.pending is not None:
        return False
    stream.residual = stream.residual[index]
    return True


def cut_rows(value: Any, index: torch.Tensor, num_rows: int) -> Any:
    """What a layer is given, or returns: tensors of `num_rows` rows are cut to the rows `index`, all else stays."""
    if isinstance(value, torch.Tensor):
        if value.ndim == 2 and value.shape[1] == num_rows and not value.is_floating_point():
            return value[:, index]  # positions of multimodal rope
        if value.shape[:1] == (num_rows,):
            return value[index]
        return value[:, index] if value.ndim > 2 and value.shape[:2] == (1, num_rows) else value
    if type(value) in (tuple, list):
        return type(value)(cut_rows(one, index, num_rows) for one in value)
    if type(value) is dict:
        return {name: cut_rows(one, index, num_rows) for name, one in value.items()}
    return value
