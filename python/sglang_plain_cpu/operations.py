"""Operations of models that SGLang has for accelerators only, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


def experts_of_rank(
    every: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """`[num_tokens, hidden]` sum of a rank's experts over `x`; experts of other ranks (expert parallelism) have id -1.

    `every` is SGLang's, which knows no such id; it gets each pair of a token and an expert as a token of its own.
    """
    tokens, places = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
    if len(tokens) == topk_output.topk_ids.numel():
        return every(layer, x, topk_output, moe_runner_config)
    if not len(tokens):
        return torch.zeros_like(x)
    pairs = topk_output._replace(
        topk_ids=topk_output.topk_ids[tokens, places][:, None],
        topk_weights=topk_output.topk_weights[tokens, places][:, None],
    )
    return torch.zeros_like(x).index_add_(0, tokens, every(layer, x[tokens], pairs, moe_runner_config))


def copy_rows(
    target: torch.Tensor, source: torch.Tensor, dim: int, offset: torch.Tensor, count: torch.Tensor, from_offset: bool
) -> None:
    """Copies `count` rows of the first dimension: from `offset` of the source on, or to there in the target."""
    assert dim == 0, "SGLang copies rows"
    rows, part = slice(int(count)), slice(int(offset), int(offset) + int(count))
    if from_offset:
        target[rows].copy_(source[part])
    else:
        target[part].copy_(source[rows])


def absorbed(_attention: Any, _forward_batch: Any) -> Any:
    """The form of latent attention (MLA) that attends from the latent rows of the pool, as `torch_native` does."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def unpinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """The tensor itself: no device copies from pinned memory here."""
    return tensor


def cpu_module(device: Any = None) -> Any:
    """`torch.cpu`; torch itself names its module for CUDA where nobody says of which device."""
    return torch.cpu


class _TorchWithoutPins:
    """`torch`, in which nothing is pinned: there is no device that would copy from pinned memory, or be waited for."""

    cuda = torch.cpu  # its events and streams are there, and have always happened

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _without_pin(value) if name in ("tensor", "zeros", "empty") else value


def _without_pin(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return created


TORCH_WITHOUT_PINS = _TorchWithoutPins()
NO_MODULE = None  # in the place of a module: its import fails


def never() -> bool:
    """Says of something that needs a GPU that it is not there."""
    return False
