"""What every kernel benchmark shares: interleaved timing, the description of the machine, the table, the JSON file."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate. On a machine that does other work too, `best` is the one to read."""

    median: float
    best: float


def measure(candidates: Mapping[str, Callable[[], object]], *, repeat: int, device: torch.device) -> dict[str, Timing]:
    """Time each candidate: one warm-up each, then taken in turns so that drift hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(repeat + 1):
        for name, run in candidates.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if round_number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing(statistics.median(values), min(values)) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [list(header), *([f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
