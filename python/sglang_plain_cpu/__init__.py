"""Serving on a machine without an accelerator: the entry point SGLang asks.

- `activate()` says whether our CPU platform serves here, by a class name or None. Only if it does, `activate()` changes
  something: it switches torch's compiler off, for this process and those that SGLang is about to start.

The platform itself is in `platform`, the arithmetic of memory and threads in `memory` and `threads`.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "sglang_plain_cpu.platform.TorchCpuPlatform"

# SGLang's own switch for its AMX / Arm engine, which needs kernels that the pinned wheels do not contain.
STOCK_CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def activate() -> str | None:
    """Names our platform class, or returns None to leave the machine to SGLang.

    None if torch sees any accelerator (CUDA, ROCm, XPU, NPU, MPS, ...), or if the user asked for SGLang's own CPU
    engine without naming ours by `SGLANG_PLATFORM=chunk_cache_cpu`.
    """
    if has_accelerator():
        return None
    if os.environ.get(STOCK_CPU_ENGINE_VARIABLE) == "1" and os.environ.get("SGLANG_PLATFORM") != "chunk_cache_cpu":
        return None
    from sglang_plain_cpu.compiler import switch_compiler_off

    switch_compiler_off()
    return PLATFORM_CLASS


def has_accelerator() -> bool:
    """Whether torch can use a device other than the CPU."""
    import torch

    return torch.cuda.is_available() or torch.accelerator.is_available()
