"""Which models keep states beside KV, by their configuration; imports nothing of a model.

Verbs: `has_states`, `method_problem` (for a method that needs what is not known of such a model).
"""

from __future__ import annotations

from typing import Any


def has_states(model_config: Any) -> bool:
    """Whether layers of a model keep states by the gated delta rule (Qwen3-Next, Qwen3.5)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model_config) is not None


def method_problem(method: str) -> str:
    """Why a method cannot serve such a model, as a clause."""
    return f"{method!r} computes single tokens within passages, where nobody knows the states of this model"
