"""Deviation of key and value from what was stored: CacheBlend's measure of how wrong a reused token is.

kv_deviation   per token ||K_new - K_old||^2 + ||V_new - V_old||^2 (CacheBlend section 4.3), over all heads
"""

from __future__ import annotations

import torch

__all__ = ["kv_deviation"]


def kv_deviation(k_new: torch.Tensor, v_new: torch.Tensor, k_old: torch.Tensor, v_old: torch.Tensor) -> torch.Tensor:
    """Squared deviation per token, in fp32 whatever the dtype.

    Args:
        k_new, k_old: [num_tokens, num_kv_heads, head_dim], at the same rotary phase.
        v_new, v_old: [num_tokens, num_kv_heads, v_head_dim].

    Returns:
        [num_tokens] fp32. Of one tensor-parallel rank's heads; the sum over ranks is the deviation.

    Raises:
        ValueError: shapes do not fit together.
    """
    if k_new.shape != k_old.shape or v_new.shape != v_old.shape or k_new.shape[0] != v_new.shape[0]:
        raise ValueError(
            f"k_new {tuple(k_new.shape)}, k_old {tuple(k_old.shape)}, v_new {tuple(v_new.shape)}, "
            f"v_old {tuple(v_old.shape)}: need the same shape of new and old, and as many tokens of K as of V"
        )
    return _squared(k_new, k_old) + _squared(v_new, v_old)


def _squared(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    difference = new.flatten(1).float() - old.flatten(1).float()
    return torch.linalg.vecdot(difference, difference)
