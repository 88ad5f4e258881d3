"""StateLayers: the layers of a loaded model that keep states, and where the states of a request lie.

Verb: `find_state_layers` (None where a model has none).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from sglang_chunk_cache.kv.state_layout import StateLayout

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class StateLayers:
    """See the head of this file.

    Attributes:
        model_runner: has SGLang's backend, which is made after the layers were found.
        layout: of the layers.
    """

    model_runner: ModelRunner
    layout: StateLayout

    @property
    def backend(self) -> Any:
        """SGLang's backend of these layers alone."""
        backend = self.model_runner.attn_backend
        assert isinstance(backend, HybridLinearAttnBackend), type(backend)
        return backend.linear_attn_backend

    def pools(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pools of a layer: `[slots, channels, kernel - 1]` and `[slots, value heads, value size, key size]`."""
        return _pools(self.model_runner, layer_id)


def find_state_layers(model_runner: ModelRunner, seam_len: int) -> StateLayers | None:
    """The layers of the model that keep states; None = it has none."""
    found = [part for part in model_runner.model.modules() if isinstance(part, RadixLinearAttention)]
    if not found:
        return None
    layer_ids = tuple(sorted(layer.layer_id for layer in found))
    conv, states = _pools(model_runner, layer_ids[0])
    heads, value_size, key_size = states.shape[1:]
    channels, width = conv.shape[1:]
    tail_dtype, state_dtype = (str(pool.dtype).removeprefix("torch.") for pool in (conv, states))
    layout = StateLayout(
        layer_ids, heads, key_size, value_size, channels, width, tail_dtype, state_dtype, seam_len=seam_len
    )
    return StateLayers(model_runner, layout)


def _pools(model_runner: ModelRunner, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache = model_runner.req_to_token_pool.mamba2_layer_cache(layer_id)
    return cache.conv[0], cache.temporal
