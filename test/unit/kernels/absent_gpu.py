"""A GPU that is not there: operations run to their launches, kernels are compiled for its architecture, none starts.

launches_for(arch)   a context that yields the launches of what is called inside; tensors lie on the CPU
resources(kernel)    registers, spills and shared memory of compiled code
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

NUM_MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, its compile key, what was compiled (None where only keys are asked for), grid."""

    kernel: str
    key: str
    compiled: Any
    grid: tuple[int, ...]


class _Driver:
    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _Uncompiled:
    """Stands in the place of a compiled kernel."""


@contextlib.contextmanager
def launches_for(arch: int, *, compiles: bool = True) -> Iterator[list[Launch]]:
    """Launches inside, in order. What an operation returns is undefined."""
    launches: list[Launch] = []
    real_run = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = real_run(self, *args, grid=grid, warmup=True, **kwargs)
        cache = self.device_caches[0][0]
        key = next(key for key, kernel in cache.items() if kernel is compiled)
        launches.append(Launch(self.__name__, key, compiled, grid))
        return compiled

    def do_not_compile(self: JITFunction, key: str, *_: Any, **__: Any) -> Any:
        self.device_caches[0][0][key] = _Uncompiled()
        return self.device_caches[0][0][key]

    tiling = importlib.import_module("sgl_kernel_ext.sparse_extend.tiling")
    driver = triton.runtime.driver
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(driver, "_active", _Driver(arch)))
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(tiling, "_num_multiprocessors", return_value=NUM_MULTIPROCESSORS[arch]))
        if not compiles:
            patches.enter_context(mock.patch.object(JITFunction, "_do_compile", do_not_compile))
        for function in _jit_functions():
            patches.enter_context(mock.patch.object(function, "device_caches", _new_caches(function)))
        yield launches


def _jit_functions() -> list[JITFunction]:
    modules = [importlib.import_module(f"sgl_kernel_ext.{name}.triton") for name in _OPERATIONS]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


_OPERATIONS = ("add_drift", "attention_mass", "copy_rotate", "kv_deviation", "question_mass", "sparse_extend")


def _new_caches(function: JITFunction) -> Any:
    return type(function.device_caches)(function.create_binder)


@dataclass(frozen=True)
class Resources:
    """Of one program; bytes are per thread but for `shared`."""

    registers: int
    stack: int
    shared: int
    mma: frozenset[str]


def resources(compiled: Any) -> Resources:
    """What the machine code uses, as NVIDIA's tools of the Triton wheel tell it."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    mma = frozenset(re.findall(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|FFMA)\b", code))
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], compiled.metadata.shared, mma)


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
