"""What a measurement ran on: `describe_machine`, `describe_code`, `commit_of`; never names of hosts or users.

`packages_of` says where the packages of a checkout lie.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CACHE_DIR = ROOT / ".cache" / "bench"
"""Folder of models, logs, and results that are not kept."""
PACKAGES = ("sglang", "torch", "transformers", "triton", "sglang-chunk-cache")


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, accelerator, system, load average of one minute."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def describe_code() -> dict[str, Any]:
    """Versions, date, and the commit, with `+changes` if the code differs from it."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": commit_of(ROOT),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def cpu_name() -> str:
    """The processor's name, or its architecture where the system tells no name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def packages_of(tree: Path) -> list[Path]:
    """The folders of a checkout that are its packages, for `PYTHONPATH`."""
    return [tree.resolve() / name for name in ("python", "scheduler", "sgl-kernel-ext")]


def commit_of(tree: Path) -> str | None:
    """The commit of a checkout, with `+changes` if packages or benchmarks differ from it; None without git."""
    code = ("python", "scheduler", "sgl-kernel-ext", "benchmark", ":(exclude)benchmark/results")
    try:
        head = _git(tree, "rev-parse", "--short=12", "HEAD")
        changed = _git(tree, "status", "--porcelain", "--untracked-files=all", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return None  # an unpacked archive, or no git here
    return head + ("+changes" if changed else "")


def _git(tree: Path, *args: str) -> str:
    result = subprocess.run(("git", "-C", str(tree), *args), check=True, capture_output=True, text=True)
    return result.stdout.strip()
