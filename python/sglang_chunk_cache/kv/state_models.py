"""Which models keep states beside KV, by their configuration; imports nothing of a model."""

from __future__ import annotations

from typing import Any


def has_states(model_config: Any) -> bool:
    """Whether layers of a model keep states by the gated delta rule (Qwen3-Next, Qwen3.5)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model_config) is not None
