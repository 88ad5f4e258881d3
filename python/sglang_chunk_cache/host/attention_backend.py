"""Decisions of SGLang about K and V before it calls an attention backend, changed where our code attends or observes.

Verbs: `enable_fused_set_kv_buffer` (handler of a hook), `writes_kv_early`, `keep_latent_rows` (at the start).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

from sglang_chunk_cache.forward.attending import attending_now

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_WRITES_EARLY = "chunk_cache_kv_is_written_early"
"""Attribute that is set on the backend of a model that writes K and V when it rotates K."""


def enable_fused_set_kv_buffer(original: Callable[[ForwardBatch], bool], forward_batch: ForwardBatch) -> bool:
    """AROUND `models.utils.enable_fused_set_kv_buffer`: where our code attends, it also writes K and V.

    A write fused into the rotation would include rows that leave before they attend, and come before a layer's load.
    """
    backend = get_attn_backend()
    attention, _ = attending_now(backend)
    if attention is not None or not original(forward_batch):
        return False
    setattr(backend, _WRITES_EARLY, True)
    return True


def writes_kv_early(backend: AttentionBackend) -> bool:
    """Whether graphs of the model were captured in which K and V of the rows are written before `backend` attends."""
    return getattr(backend, _WRITES_EARLY, False)


def keep_latent_rows() -> None:
    """Has layers of latent attention (MLA) attend from the latent rows of the pool where our code attends or observes.

    SGLang chooses between that form and one with K and V of every head, for which a backend has no rows to attend from.
    """
    for name, choose in list(AttentionBackendRegistry._handlers.items()):
        if not isinstance(choose, _LatentChoice):
            AttentionBackendRegistry.register(name, _LatentChoice(choose))


@dataclass(frozen=True)
class _LatentChoice:
    """SGLang's choice between the two forms, for one of its backends, except where latent rows are needed."""

    stock: Callable[[Any, Any], Any]

    def __call__(self, attention: Any, forward_batch: Any) -> Any:
        ours, observers = attending_now(get_attn_backend())
        if ours is not None or any(one.observes(attention.layer_id) for one in observers):
            return AttnForwardMethod.MLA
        return self.stock(attention, forward_batch)
