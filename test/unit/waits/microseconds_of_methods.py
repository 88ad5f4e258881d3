"""What a fused batch of each method costs the host, as a table of benchmark/results/gpu/launches.md.

    python test/unit/waits/microseconds_of_methods.py measure OUT           in any commit that has the fake scheduler
    python test/unit/waits/microseconds_of_methods.py table BEFORE NOW      of what `measure` wrote; writes the table

Counted is processor time of the scheduler's thread in lines of our code and what they call, but SGLang: a timer asks
whose line runs. The GPU is one that is not there, with values: Triton kernels are left out, all other operations are
computed by the CPU, on a model so small that this takes about as long as to launch them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from chunk_cache.methods import METHODS
from doc_pages import write_made_part
from local_scheduler import LocalScheduler
from tiny_models import make_model
from unit.waits.fake_gpu import OURS, FakeGpu
from unit.waits.fake_scheduler import NUM_LAYERS, Fake, remember

PROGRAM = "test/unit/waits/microseconds_of_methods.py"
PAGE = "../benchmark/results/gpu/launches.md"  # of docs
SIZES = (1, 8)
ROUNDS = 70
_EVERY_S = 2e-4


class Sampler:
    """Processor time of this thread inside, in our lines: `seconds` outside of the model's layers, and in them."""

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0]
        self._last = 0.0

    def __enter__(self) -> Sampler:
        signal.signal(signal.SIGALRM, self._look)
        self._go_on()
        return self

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _go_on(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _EVERY_S)
        self._last = time.thread_time()

    def _look(self, _: int, frame: FrameType | None) -> None:
        passed = time.thread_time() - self._last
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        innermost = next((file for file in files if _is_any(file, (*OURS, "/sglang/"))), "")
        if _is_any(innermost, OURS):
            self.seconds[any("/sglang/srt/models/" in file for file in files)] += passed
        self._go_on()


def _is_any(file: str, parts: tuple[str, ...]) -> bool:
    return any(part in file for part in parts)


def measure(out: Path) -> None:
    """Writes microseconds of every batch, `[outside of layers, in layers]`, by method and number of requests."""
    batches: dict[str, dict[str, list[Any]]] = {method: {str(size): [] for size in SIZES} for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "model", layers=NUM_LAYERS)
        flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 16384, "sampling_backend": "pytorch"}
        local = LocalScheduler(model, chunk_cache={"config": {}}, **flags)
    with FakeGpu.there(has_values=True) as gpu:
        fake = Fake(gpu, local)
        with mock.patch.object(torch, "empty", torch.ones):  # statistics that no kernel writes
            remember(fake)
        fake.max_new_tokens = 1
        for number in range(ROUNDS + 1):
            for method, size in itertools.product(METHODS, SIZES):
                requests = [fake.fused(method=method, ratio=0.15) for _ in range(size)]
                with Sampler() as sampler:
                    replies = local.generate(requests)
                assert all(reply.info["reused_tokens"] > 0 or method == "full" for reply in replies)
                if number:  # what runs for the first time imports and compiles
                    batches[method][str(size)].append([round(1e6 * one, 1) for one in sampler.seconds])
    out.write_text(json.dumps(batches) + "\n")


def table(before: dict[str, Any], now: dict[str, Any], commit: str) -> str:
    """Medians and, in brackets, their standard errors; in one layer the median alone."""
    lines = [
        f"| method | one request: {commit} | now | eight: {commit} | now | in one layer, eight: {commit} | now |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in now:
        cells = []
        for size in map(str, SIZES):
            for own in (np.array(of[method][size]).sum(axis=1) for of in (before, now)):
                middle = np.median(own)
                error = 1.25 * 1.48 * np.median(np.abs(own - middle)) / len(own) ** 0.5
                cells.append(f"{middle:,.0f} ({error:,.0f})")
        cells += [f"{np.median(np.array(of[method]['8'])[:, 1]) / NUM_LAYERS:,.0f}" for of in (before, now)]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)  # of threads that SGLang started
    before, now = (json.loads(Path(path).read_text()) for path in sys.argv[2:])
    write_made_part(PAGE, PROGRAM, table(before, now, "5489a3b"))


if __name__ == "__main__":
    main()
