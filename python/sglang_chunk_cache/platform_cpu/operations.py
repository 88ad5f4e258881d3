"""Operations of models that SGLang has for accelerators only, in plain torch.

Verb: `install` (once per process; the kernels' launchers are replaced, so whoever imported their callers gets it too).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Replaces the launchers of SGLang's kernels by these functions; latent attention runs on `torch_native`.

    LoRA asks for pinned memory wherever it keeps a number: here it gets what it would pin.
    """
    import sglang.srt.lora.backend.torch_backend
    import sglang.srt.lora.layers
    from sglang.kernels.ops.activation import softcap
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register("torch_native", absorbed)
    softcap._softcap_logits = softcap_logits
    elementwise._launch_fused_gate_sigmoid_mul = gate_sigmoid_mul
    sglang.srt.lora.layers.torch = sglang.srt.lora.backend.torch_backend.torch = _TorchWithoutPins()
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def softcap_logits(logits: torch.Tensor, cap: float | None, output: torch.Tensor | None = None) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, or the logits where `cap` is None; into `output` (fp32), or in place."""
    target = logits if output is None else output.copy_(logits)
    return target if cap is None else target.div_(cap).tanh_().mul_(cap)


def gate_sigmoid_mul(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """`output` becomes, or grows by, `shared_output` times the sigmoid of `hidden_states @ gate_weight`, by token."""
    gated = torch.sigmoid(hidden_states @ gate_weight)[:, None] * shared_output
    output.add_(gated) if do_add else output.copy_(gated)


def absorbed(_attention: Any, _forward_batch: Any) -> Any:
    """The form of latent attention (MLA) that attends from the latent rows of the pool, as `torch_native` does."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


class _TorchWithoutPins:
    """`torch`, in which nothing is pinned: there is no device that would copy from pinned memory."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _without_pin(value) if name in ("tensor", "zeros") else value


def _without_pin(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return created
