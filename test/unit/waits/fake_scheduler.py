"""SGLang's scheduler with the chunk cache on a GPU that is not there; one part of the traffic after another.

    python fake_scheduler.py CASE MODEL_DIR OUT     runs in a process of its own and writes what was issued, as JSON

The scheduler is built on the CPU (`local_scheduler`). Then its tensors become the fake GPU's, and requests run: every
line of the host's side is real, the values are not. SGLang's attention is left out, its metadata too.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the other one reads addresses of tensors
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._subclasses.fake_tensor import FakeTensor

from local_scheduler import LocalScheduler, Reply, Request
from tiny_models import make_model
from unit.waits.fake_gpu import FakeGpu

NUM_LAYERS = 4
CHUNK_LEN, NUM_CHUNKS, QUESTION_LEN = 120, 12, 17


@dataclass
class Part:
    """What one part of the traffic issued from our code, each with its place and how often."""

    waits: dict[str, int]
    launches: dict[str, int]
    """Operations that the GPU executes."""
    views: dict[str, int]
    replies: list[dict[str, Any]] = field(default_factory=list)


def move_to_gpu(root: Any, module: Any) -> None:
    """Every tensor that is reached from `root` becomes the fake GPU's, but what is named as the host's."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    seen: set[int] = set()

    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in moved:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            moved[id(tensor)] = (tensor, torch.nn.Parameter(fake, requires_grad=False) if is_parameter else fake)
        return moved[id(tensor)][1]

    def moved_value(name: object, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return on_gpu(value)
        if name == "device" and value in ("cpu", torch.device("cpu")):
            return "cuda" if isinstance(value, str) else torch.device("cuda")
        return module if value is torch.cpu else value

    stack = [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if hasattr(one, "__dict__") and type(one).__module__.startswith(("sglang", "torch.nn")):
            stack.append(vars(one))
        if hasattr(type(one), "__slots__") and type(one).__module__.startswith("sglang"):
            stack += [getattr(one, name, None) for name in type(one).__slots__]
        if isinstance(one, (list, dict)):
            items = one.items() if isinstance(one, dict) else enumerate(one)
            for name, value in list(items):
                if not str(name).endswith("_cpu"):
                    one[name] = moved_value(name, value)
                    stack.append(one[name])


class Fake:
    """A scheduler on the fake GPU, and chunks to send."""

    def __init__(self, gpu: FakeGpu, local: LocalScheduler) -> None:
        self.gpu, self.local = gpu, local
        self.parts: dict[str, Part] = {}
        self._draw = random.Random(0)
        self.system = self.tokens(20)
        self.chunks = [self.tokens(CHUNK_LEN) for _ in range(NUM_CHUNKS)]
        self._replace_what_knows_the_device()

    def _replace_what_knows_the_device(self) -> None:
        from sglang.srt.model_executor import forward_batch_info

        scheduler = self.local.scheduler
        move_to_gpu(scheduler, self.gpu.module)
        chunks = scheduler.tree_cache.chunks
        assembler = chunks.assembler
        assembler.rotary = replace(
            assembler.rotary, inv_freq=torch.empty_like(assembler.rotary.inv_freq, device="cuda")
        )
        assembler._kernel, assembler._is_cpu = "triton", False
        scheduler.tree_cache.chunks = replace(chunks, kernel="triton", min_run_len=8)
        forward_batch_info.support_triton = lambda _: True
        backend = type(scheduler.tp_worker.model_runner.attn_backend)
        backend.forward = lambda self, q, *args, **kwargs: torch.empty_like(q)
        backend.init_forward_metadata = lambda self, batch: None

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(10, 200) for _ in range(count)]

    def request(self, chunks: Sequence[list[int]], **options: Any) -> Request:
        """A prompt whose first chunk does not follow the system prompt, so that none is exact."""
        ids, spans = [*self.system, *self.tokens(5)], []
        for chunk in chunks:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return Request(ids + self.tokens(QUESTION_LEN), {"spans": spans, **options}, num_top=0, max_new_tokens=3)

    def fused(self, num_chunks: int = 6, **options: Any) -> Request:
        """A prompt of stored chunks."""
        return self.request(self._draw.sample(self.chunks, num_chunks), **options)

    def send(self, name: str, requests: Sequence[Request]) -> list[Reply]:
        """All in one batch, run to the end and to an idle server; what they issue is a part."""
        with self.gpu.watching() as watch:
            replies = self.local.generate(requests)
        launches, views = (
            collections.Counter(str(call) for call in watch.own_operations if call.is_view == is_view)
            for is_view in (False, True)
        )
        waits = collections.Counter(watch.own_waits)
        self.parts[name] = Part(dict(waits), dict(launches), dict(views), [one.info for one in replies])
        return replies


def case_methods(fake: Fake) -> None:
    """Chunks are computed and remembered, then fused batches of every method that chooses."""
    for i, chunk in enumerate(fake.chunks):
        fake.send(f"observed {i}", [fake.request([chunk])])
    from chunk_cache.methods import METHODS

    fused = [name for name in METHODS if name not in ("cacheclip", "full")]
    for options in ({}, {"explain": True}, {"group_size": 8, "group_threshold": 2}, {"focus_window": 2}):
        for method in fused:
            own = {key: value for key, value in options.items() if key != "explain"}
            explain = {"explain": True} if "explain" in options else {}
            for size in (1, 8):
                requests = [fake.fused(method=method, ratio=0.15, options=own, **explain) for _ in range(size)]
                fake.send(f"{method} {' '.join(options)} {size}".replace("  ", " "), requests)


CASES: dict[str, tuple[dict[str, Any], Callable[[Fake], None]]] = {"methods": ({}, case_methods)}


def main() -> None:
    name, model_dir, out = sys.argv[1:]
    config, case = CASES[name]
    model = make_model("llama", model_dir, layers=NUM_LAYERS)
    flags = {"dtype": "float32", "max_total_tokens": 16384, "sampling_backend": "pytorch"}
    local = LocalScheduler(model, chunk_cache={"config": config}, **flags)
    with FakeGpu.there() as gpu:
        fake = Fake(gpu, local)
        case(fake)
    Path(out).write_text(json.dumps({name: asdict(part) for name, part in fake.parts.items()}))
    sys.stdout.flush()
    os._exit(0)  # of threads that SGLang started


if __name__ == "__main__":
    main()
