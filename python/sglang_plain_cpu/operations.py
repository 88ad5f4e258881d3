"""Operations that SGLang has for accelerators only, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def softcap_logits(logits: torch.Tensor, cap: float | None, output: torch.Tensor | None = None) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, or the logits if `cap` is None; written into `output` (fp32), or in place."""
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
    """Sets `output` to `shared_output * sigmoid(hidden_states @ gate_weight)`, by token; with `do_add`, adds that."""
    gated = torch.sigmoid(hidden_states @ gate_weight)[:, None] * shared_output
    output.add_(gated) if do_add else output.copy_(gated)


def experts_of_rank(
    every: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """`[num_tokens, hidden]` sum of a rank's experts over `x`; experts of other ranks (expert parallelism) have id -1.

    SGLang's function `every` does not know this id. If it occurs, `every` gets each other pair of a token and an expert
    as a separate token.
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
    """Copies `count` rows: with `from_offset`, from `offset` of the source on; else to `offset` of the target on."""
    assert dim == 0, "SGLang copies rows"
    rows, part = slice(int(count)), slice(int(offset), int(offset) + int(count))
    if from_offset:
        target[rows].copy_(source[part])
    else:
        target[part].copy_(source[rows])


def absorbed(_attention: Any, _forward_batch: Any) -> Any:
    """The form of latent attention (MLA) that attends to the latent rows of the pool, as `torch_native` does."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def unpinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """The tensor itself, since no device here copies from pinned memory."""
    return tensor


def cpu_module(device: Any = None) -> Any:
    """`torch.cpu`; torch's own function returns the CUDA module if no device is named."""
    return torch.cpu


class _TorchWithoutPins:
    """`torch` without pinned memory: there is no device that would copy from it, or that must be waited for."""

    cuda = torch.cpu  # it has events and streams too; its events have always happened

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _without_pin(value) if name in ("tensor", "zeros", "empty") else value


def _without_pin(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return created


TORCH_WITHOUT_PINS = _TorchWithoutPins()
NO_MODULE = None  # replaces a module, whose import then fails


def never() -> bool:
    """Replaces a check for something that needs a GPU: it is not there."""
    return False
