"""Checks of this machine, without a server: `machine_checks`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil
from packaging.specifiers import SpecifierSet

from chunk_cache.advice import Level
from chunk_cache_tools.doctor.checks import Check
from chunk_cache_tools.requirements import DISTRIBUTION, SERVER, install_sglang, pinned, requirements
from sglang_plain_cpu import STOCK_CPU_ENGINE_VARIABLE, has_accelerator

HOOKS_TIMEOUT_S = 300
_APPLY_HOOKS = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_chunk_cache.start import hooks
hooks.apply_hooks()
print(len(hooks.HOOKS))
"""  # run in a separate process: hooks cannot be taken back


def machine_checks() -> Iterator[Check]:
    """Checks of Python, packages and, if a server is installed, of the hooks and the device of the model."""
    yield _python()
    if not (has_torch() or importlib.util.find_spec("sglang")):
        found = "its packages are not installed: SGLang, torch and others; the tools run without them"
        remedy = f"to serve on this machine, run `{install_sglang()}`"
        yield Check(SERVER, Level.WARNING, found, remedy)
        yield from _packages(extra="")
        return
    yield from _packages()
    if has_torch() and importlib.util.find_spec("sglang"):
        yield _hooks()
        yield _device()


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def _python() -> Check:
    wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    found = platform.python_version()
    if SpecifierSet(wanted).contains(found):
        return Check("Python", Level.OK, found)
    return Check("Python", Level.FAILURE, f"{found}, and {wanted} is wanted", "make an environment with such a Python")


def _packages(extra: str = SERVER) -> Iterator[Check]:
    """Checks of the installed packages; those that fit share one check, except SGLang and torch."""
    fitting = []
    for wanted in requirements(extra):
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(
                wanted.name, Level.FAILURE, "not installed", f"run `pip install '{wanted.name}{wanted.specifier}'`"
            )
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found = f"{version}, and {wanted.specifier} is wanted"
            yield Check(wanted.name, Level.WARNING, found, f"run `pip install '{wanted.name}{wanted.specifier}'`")
        elif wanted.name in ("sglang", "torch"):
            yield Check(wanted.name, Level.OK, version)
        else:
            fitting.append(f"{wanted.name} {version}")
    yield Check("packages", Level.OK, ", ".join(fitting))


def _hooks() -> Check:
    command = [sys.executable, "-c", _APPLY_HOOKS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HOOKS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Check(
            "hooks", Level.FAILURE, f"not applied after {HOOKS_TIMEOUT_S} s", "look at the load of the machine"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word of why"]
        remedy = f"install sglang{pinned('sglang')}, without other plugins that replace the same classes"
        return Check("hooks", Level.FAILURE, lines[-1], remedy)
    return Check("hooks", Level.OK, f"all {done.stdout.split()[-1]} apply to the installed SGLang")


def _device() -> Check:
    import torch

    if torch.cuda.is_available():
        every = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        return Check("device", Level.OK, ", ".join(f"{one.name}, {one.total_memory / 1e9:.0f} GB" for one in every))
    if has_accelerator():
        found = f"{torch.accelerator.current_accelerator()}, on which nothing has been run"
        return Check("device", Level.WARNING, found, "see docs/compatibility.md")
    if shutil.which("nvidia-smi") is not None:
        found = f"torch {torch.__version__} sees no GPU, and nvidia-smi is there"
        remedy = f"install a torch for the driver's CUDA (this one: {torch.version.cuda or 'none'})"
        return Check("device", Level.WARNING, found, remedy)
    if os.environ.get(STOCK_CPU_ENGINE_VARIABLE) == "1":
        found = f"no GPU, and {STOCK_CPU_ENGINE_VARIABLE}=1 asks for SGLang's own CPU engine"
        return Check("device", Level.WARNING, found, f"unset {STOCK_CPU_ENGINE_VARIABLE}")
    free = psutil.virtual_memory().available
    return Check(
        "device", Level.OK, f"no GPU: the CPU platform serves, {os.cpu_count()} cores, {free / 1e9:.0f} GB free"
    )
