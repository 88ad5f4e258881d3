"""KVAssembler: moves the KV of chunks into the slots of a request, at their new positions.

Verbs: `copy` (slots to slots, with the rotary phase of K shifted), `model_rotary_spec` (what the model's rotation is).

Promises: a copy is enqueued behind every forward that was launched before it and before every later one, so its
sources are complete, and both sources and targets may change hands as soon as `copy` returns. Nothing waits on the
host. The rotation that is applied was compared with the model's own cosine table when the server started.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_schedule

from sgl_kernel_ext.copy_rotate import copy_rotate
from sgl_kernel_ext.rotary import (
    RotaryMismatchError,
    RotarySpec,
    UnsupportedRotaryError,
    spec_from_sglang_rope,
    verify_spec,
)
from sglang_chunk_cache.server_args import refuse

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class KVAssembler:
    """Copies KV between slots of one pool.

    Args:
        model_runner: owner of the model and of the stream that forwards run on.
        kv_pool: SGLang's multi-head KV pool (`k_buffer` / `v_buffer`, one tensor `[num_slots, heads, dim]` per layer).
        kernel: backend of `copy_rotate`.

    Raises:
        StartRefused: the model's rotation cannot be shifted.
    """

    def __init__(self, model_runner: ModelRunner, kv_pool: Any, kernel: str) -> None:
        self._spec = model_rotary_spec(model_runner.model, model_runner.model_config.context_len)
        self._k_buffers: list[torch.Tensor] = list(kv_pool.k_buffer)
        self._v_buffers: list[torch.Tensor] = list(kv_pool.v_buffer)
        self._kernel = kernel
        self._model_runner = model_runner
        self._is_cpu = torch.device(kv_pool.device).type == "cpu"

    def copy(self, src_loc: torch.Tensor, dst_loc: torch.Tensor, position_delta: torch.Tensor) -> None:
        """Copies K and V of every layer from `src_loc` to `dst_loc`, K rotated by `position_delta` positions.

        Args:
            src_loc, dst_loc: `[num_tokens]` int64 slots, on the pool's device, without overlap.
            position_delta: `[num_tokens]` int64, new minus old position; 0 copies bit by bit.
        """
        with self._behind_launched_forwards():
            copy_rotate(
                self._k_buffers, self._v_buffers, src_loc, dst_loc, position_delta, self._spec, backend=self._kernel
            )

    def _behind_launched_forwards(self) -> contextlib.AbstractContextManager[Any]:
        if self._is_cpu or get_schedule().disable_overlap_schedule:
            return contextlib.nullcontext()  # forwards run on the current stream
        return self._on_forward_stream()

    @contextlib.contextmanager
    def _on_forward_stream(self) -> Any:
        device_module = torch.get_device_module()
        forward_stream = self._model_runner.forward_stream
        schedule_stream = device_module.current_stream()
        forward_stream.wait_stream(schedule_stream)  # the index tensors were made there
        with device_module.stream(forward_stream):
            yield
        # Slots that are freed and handed out again are written by later forwards, which run on the same stream.


def model_rotary_spec(model: torch.nn.Module, context_len: int) -> RotarySpec:
    """The one rotation that all layers of `model` use, checked for positions below `context_len`.

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
