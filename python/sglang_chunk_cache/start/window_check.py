"""Whether SGLang's attention backends know of the windows of a model's layers, beside the layers themselves.

Verb: `check_windows`. A backend that plans its windows for the whole model asks the model for one. Where the layers
with a window have a pool of their own, SGLang takes it from config.json instead; here all layers share one pool
(`refusals.prepare_flags`), so nobody tells it where the class does not, and it decodes over all tokens or fails.
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
        of_layers: of each layer; -1 = all tokens.
        backends: SGLang's, for prefill and for decoding.

    Raises:
        StartRefused: they are not.
    """
    planned = [backend for backend in PLANNED if backend in backends]
    if planned and window is None and max(of_layers) > -1:
        refuse(
            f"SGLang's attention backend {planned[0]} leaves out the windows of this model where all layers are in one "
            "pool, so it cannot serve --chunk-cache; add --attention-backend fa3 (trtllm_mha on a B200)."
        )
