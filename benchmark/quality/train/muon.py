"""Muon: momentum whose update is orthogonalized, for the matrices inside the layers (Jordan et al., 2024).

Matrices of one shape are orthogonalized together in fp32: `torch.optim.Muon` goes one by one in bf16, which is slow
on a CPU without bf16 instructions.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

# Coefficients of the quintic Newton-Schulz iteration (Jordan, "Muon: an optimizer for hidden layers", 2024).
A, B, C = 3.4445, -4.7750, 2.0315
NUM_ITERATIONS = 5


def orthogonalize(x: Tensor) -> Tensor:
    """Nearly the closest semi-orthogonal matrices of [batch, rows, columns]: singular values go to about 1."""
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum 0.95; the learning rate is scaled by sqrt(rows / columns) where that is above 1."""

    def __init__(self, params, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                updates = torch.stack([self._momentum(param, group["momentum"]) for param in params])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for param, update in zip(params, orthogonalize(updates), strict=True):
                    param.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, param: Tensor, momentum: float) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        average = state["momentum"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)
