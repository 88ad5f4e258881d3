"""SGLang's kernels of layers with states where there is no GPU: `make_callable`, once in a process of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from sglang.kernels.ops.attention.fla import chunk_fwd
from triton.runtime.autotuner import Autotuner


def make_callable() -> None:
    """From here on they ask for no device, and none is tuned."""
    torch.cpu.device = lambda _: contextlib.nullcontext()  # type: ignore[attr-defined]
    kernel: Any = chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel
    while not isinstance(kernel, Autotuner):
        kernel = kernel.fn
    kernel.configs = kernel.configs[:1]
