"""Rows that leave between layers, and K and V that are corrected, in a model that writes K and V where it rotates K.

On CUDA that is a kernel of SGLang's (`enable_fused_set_kv_buffer`); here the rotation writes them with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from exactness.cases import Session
from exactness.recorded_graph import use_graphs
from local_scheduler import Reply

__all__ = ["CASES", "Session"]


def _write_with_the_rotation(model: Any, enabled: Callable[[Any], bool]) -> None:
    """From here on the model asks `enabled` of each batch."""
    from sglang.srt.models import qwen3_moe

    qwen3_moe.enable_fused_set_kv_buffer = enabled
    rope = model.model.layers[0].self_attn.rotary_emb  # that of all layers

    def forward(positions: Any, q: Any, k: Any, fused_set_kv_buffer_arg: Any = None) -> Any:
        q, k = rope.forward_native(positions, q, k)
        write = fused_set_kv_buffer_arg
        if write is not None:
            write.k_buffer[write.cache_loc] = k.flatten(1)
            write.v_buffer[write.cache_loc] = write.value.flatten(1)
        return q, k

    rope.forward = forward


def case_rows_leave(s: Session, how: int) -> list[Reply]:
    """`how`: 0 = SGLang's own on a CPU, nothing is fused; 1 = fused, with our hook; 2 = fused, without it."""
    answers = set()
    if how:
        from sglang.srt.models import qwen3_moe, utils

        as_the_model_asks = qwen3_moe.enable_fused_set_kv_buffer

        def on_a_gpu(batch: Any) -> bool:
            with mock.patch.object(utils, "_is_hip", True):
                answer = as_the_model_asks(batch)
            answers.add(answer)
            return answer

        model = s.local.scheduler.tp_worker.model_runner.model
        _write_with_the_rotation(model, on_a_gpu if how == 1 else lambda _: True)
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for method in ("cacheblend", "a3"):
        s.send(s.prompt([chunks[3], chunks[1], chunks[0]]), ratio=0.3, options={"method": method})
    assert how != 1 or answers == {True, False}, "plain batches are fused, ours are not"
    return s.replies


def case_drift(s: Session, how: int) -> list[Reply]:
    """`how`: 0 = SGLang's own on a CPU; 1 = fused, by prefill graphs that were captured so; 2 = and nobody notes it."""
    runner = s.local.scheduler.tp_worker.model_runner
    for layer in runner.model.model.layers:
        layer.mlp.forward = lambda hidden, *args, **kwargs: hidden / 2  # experts of a CPU are in no graph
    if how:
        from sglang.srt.models import qwen3_moe, utils

        from sglang_chunk_cache.host import model_runner as forwards

        as_the_model_asks = qwen3_moe.enable_fused_set_kv_buffer

        def on_a_gpu(batch: Any) -> bool:
            with mock.patch.object(utils, "_is_hip", True):
                return bool(as_the_model_asks(batch))

        _write_with_the_rotation(runner.model, on_a_gpu)
        use_graphs(runner, [32, 64, 128, 256])
        if how == 2:
            forwards.writes_kv_early = lambda _: False
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for method in ("question-drift", "epic"):
        options = {"method": method, "options": {"drift": 0.5}}
        s.send(s.prompt([chunks[3], chunks[1], chunks[0]]), ratio=0.3, options=options)
    return s.replies


CASES = {"rows_leave": case_rows_leave, "drift": case_drift}
