"""What is asked of a model: how its keys are rotated, and where its decoder layers and residual stream are.

A model class differs from another, as far as reuse goes, in this file only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sgl_kernel_ext.rotary import (
    RotaryMismatchError,
    RotarySpec,
    UnsupportedRotaryError,
    spec_from_sglang_rope,
    verify_spec,
)
from sglang_chunk_cache.server_args import refuse

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def rotary_of(model: torch.nn.Module, context_len: int) -> RotarySpec:
    """The one rotation that all layers of `model` use, compared with its own cosine table below `context_len`.

    Raises:
        StartRefused: no rotary embedding, several different ones, or a type without a fixed frequency per dimension.
    """
    modules = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "rotary_dim")}
    if len(modules) != 1:
        refuse(f"the model has {len(modules)} different rotary embeddings; exactly one is supported.")
    (rope,) = modules.values()
    try:
        spec = spec_from_sglang_rope(rope)
        verify_spec(spec, rope.cos_sin_cache, torch.arange(min(context_len, len(rope.cos_sin_cache))))
    except (UnsupportedRotaryError, RotaryMismatchError) as error:
        refuse(f"the rotary embedding of the model is not supported: {error}")
    return spec


def decoder_of(model: torch.nn.Module) -> Any:
    """The module whose `layers` are the decoder layers; the supported model classes have it under one name."""
    decoder = model.model
    assert isinstance(decoder.layers, torch.nn.ModuleList), f"{type(decoder).__name__} has no list of layers"
    return decoder


def keep_residual_rows(batch: ForwardBatch, index: torch.Tensor) -> None:
    """Cuts the residual stream to the rows `index`; called by the attention of a layer."""
    stream = batch.residual_stream
    assert stream is not None, "rows leave inside a layer stack"
    assert stream.pending is None, "rows leave between the two residual updates of a layer"
    stream.residual = stream.residual[index]
