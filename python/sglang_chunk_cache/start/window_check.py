"""Whether SGLang's attention backend knows the sliding window of a model, if it plans one for the whole model.

Verb: `check_windows`. Such a backend asks the model's class for the window. Where layers with a window have a KV pool
of their own, SGLang takes the window from config.json instead. Here all layers share one pool
(`refusals.prepare_flags`), so if the class names no window, the backend has none, and decodes over all tokens or fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang_chunk_cache.flags.server_args import refuse

PLANNED = ("flashinfer", "triton")
"""Backends that plan the windows of a whole model; others take the window of each layer."""


def check_windows(window: int | None, of_layers: Iterable[int], backends: Collection[str]) -> None:
    """Checks that windows are planned where there are any.

    Args:
        window: `sliding_window_size` of SGLang's model runner.
        of_layers: the window of each layer; -1 = all tokens.
        backends: SGLang's, for prefill and for decoding.

    Raises:
        StartRefused: a backend would not plan them.
    """
    planned = [backend for backend in PLANNED if backend in backends]
    if planned and window is None and max(of_layers) > -1:
        refuse(
            f"SGLang's attention backend {planned[0]} leaves out the windows of this model where all layers are in one "
            "pool, so it cannot serve --chunk-cache; add --attention-backend fa3 (trtllm_mha on a B200)."
        )
