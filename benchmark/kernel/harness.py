"""What every kernel benchmark shares: flags, the op's own tests first, interleaved timing, floors, the result files.

    parser, prepare     the flags that all have; threads, device, dtype, and the tests of the op, which must pass
    measure             milliseconds of some candidates that take turns
    bandwidth, flop_rate    what this machine does at best: bytes copied, floating-point operations, per second
    peak_bytes          memory that one call takes beside what was there
    finish              the table on the screen, and `benchmark/results/kernel/<op>.{json,md}`

Needs torch and psutil, and pytest for the tests, but not SGLang. The tests of an op run its torch path; where the
Triton path is timed, test_triton.py runs that in the interpreter. Each benchmark then compares what it times with the
op's definition, on its own device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "sgl-kernel-ext"))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one candidate. On a machine that does other work too, `best` is the one to read."""

    median: float
    best: float


def parser(description: str, *, more_dtypes: Sequence[str] = (), **defaults: int) -> argparse.ArgumentParser:
    """Flags of all benchmarks, and integer flags with these defaults; `more_dtypes` are what only some ops take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    dtypes = ["float32", "float16", "bfloat16", *more_dtypes]
    made.add_argument("--dtype", choices=dtypes, help="default: bfloat16 on a GPU, float32")
    made.add_argument("--backend", default="auto", choices=["auto", "torch", "triton"])
    for name, default in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default: %(default)s")
    made.add_argument("--repeat", type=int, default=7, help="rounds (default: %(default)s)")
    made.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    made.add_argument("--skip-tests", action="store_true", help="do not run the op's tests first")
    made.add_argument("--out", type=Path, default=RESULTS_DIR / "kernel", metavar="DIR", help="folder of the results")
    return made


def prepare(args: argparse.Namespace, op: str) -> tuple[torch.device, torch.dtype, dict[str, Any]]:
    """Device, dtype, and where the numbers come from; ends the process where the op's tests fail."""
    about = describe_run()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if not args.skip_tests:
        names = [op, "triton"] if args.backend == "triton" or device.type == "cuda" else [op]
        tests = [str(ROOT / "test" / "unit" / "kernels" / f"test_{name}.py") for name in names]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:2])}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *tests], cwd=ROOT, env=env, check=False)
        if done.returncode:
            raise SystemExit(f"the tests of {op} fail, so nothing is timed")
    return device, dtype, about | {"threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch.")}


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


def bandwidth(device: torch.device, num_bytes: int = 1 << 28) -> float:
    """Bytes per second of a copy that no cache holds, read and written; the best of some."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = measure({"copy": lambda: target.copy_(source)}, repeat=5, device=device)["copy"].best
    return 2 * num_bytes / (best / 1e3)


def flop_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product of matrices; the best of some."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = measure({"mm": lambda: a @ b}, repeat=5, device=device)["mm"].best
    return 2 * size**3 / (best / 1e3)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Memory that one call takes at its peak, beside what was there before; its result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def finish(args: argparse.Namespace, op: str, title: str, report: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Prints `report["results"]`, whose rows have equal keys, and writes both files."""
    rows = report["results"]
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    table = markdown_table(list(rows[0]), cells)
    head = [f"# {title}", "", *run_markdown(report)]
    head.append(f"- {report['shape']}, {report['dtype']}, {report['threads']} threads")
    measured = f"{report['gigabytes_per_s']:.1f} GB/s copied, {report['gigaflops']:.0f} GFLOP/s in products of matrices"
    head.append(f"- this machine: {measured}")
    paths = write_result(args.out, op, report, [*head, "", *notes, "", *table])
    print("\n".join(table))
    print("written:", ", ".join(str(path) for path in paths))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; run on Linux")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
