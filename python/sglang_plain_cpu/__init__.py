"""Serving on a machine without an accelerator: the entry point SGLang asks.

- `activate()` answers "shall our CPU platform serve here?" with a class name or None, and changes nothing else than
  the environment of the processes that SGLang is about to start, and only when the answer is yes.

The platform itself is in `platform`, the arithmetic of memory and threads in `memory` and `threads`.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "sglang_plain_cpu.platform.TorchCpuPlatform"

# SGLang's own switch for its AMX / Arm engine, which needs other kernels than the pinned wheels bring.
STOCK_CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def activate() -> str | None:
    """Names our platform class, or returns None to leave the machine to SGLang.

    None where torch sees any accelerator (CUDA, ROCm, XPU, NPU, MPS, ...) and where the user asked for SGLang's own CPU
    engine, unless `SGLANG_PLATFORM=chunk_cache_cpu` names ours.
    """
    if has_accelerator():
        return None
    if os.environ.get(STOCK_CPU_ENGINE_VARIABLE) == "1" and os.environ.get("SGLANG_PLATFORM") != "chunk_cache_cpu":
        return None
    from sglang_plain_cpu.compiler import switch_compiler_off

    switch_compiler_off()
    return PLATFORM_CLASS


def has_accelerator() -> bool:
    """True when torch can use a device other than the CPU."""
    import torch

    return torch.cuda.is_available() or torch.accelerator.is_available()
