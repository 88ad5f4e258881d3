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
import subprocess
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
PASSAGES = (2, 6, 12)
STATE_KERNELS = ("fla/", "linear/", "mamba/")
CHUNK_LEN, NUM_CHUNKS, QUESTION_LEN = 120, 12, 17


@dataclass
class Part:
    """What one part of the traffic issued from our code, each with its place and how often."""

    waits: dict[str, int]
    launches: dict[str, int]
    """Operations that the GPU executes."""
    views: dict[str, int]
    replies: list[dict[str, Any]] = field(default_factory=list)
    state_kernels: int = 0
    """Kernels of SGLang's layers with states."""
    layouts: int = 0
    """How often SGLang reads back from the GPU how the rows of these kernels are divided into sequences."""


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
        self.max_new_tokens = 3
        self._draw = random.Random(0)
        self.system = self.tokens(20)
        self.chunks = [self.tokens(CHUNK_LEN) for _ in range(NUM_CHUNKS)]
        self._replace_what_knows_the_device()

    def _replace_what_knows_the_device(self) -> None:
        from sglang.srt.model_executor import forward_batch_info

        scheduler = self.local.scheduler
        if not self.gpu.has_values:
            move_to_gpu(scheduler, self.gpu.module)
        chunks = scheduler.tree_cache.chunks
        assembler = chunks.assembler
        rotary = chunks.layers.rotary
        if not self.gpu.has_values:
            rotary = replace(rotary, inv_freq=torch.empty_like(rotary.inv_freq, device="cuda"))
        layers = replace(chunks.layers, rotaries=(rotary,) * len(chunks.layers.rotaries))
        assembler._rotaries, assembler.kernel, assembler._is_cpu = layers.rotaries, "triton", False
        assembler._all_alike = assembler._alike(range(len(layers.rotaries)))
        scheduler.tree_cache.chunks = replace(chunks, layers=layers, kernel="triton", min_run_len=8)
        forward_batch_info.support_triton = lambda _: not self.gpu.has_values
        runner_backend = scheduler.tp_worker.model_runner.attn_backend
        if chunks.states is not None:
            _use_kernels_of_states()
            runner_backend = runner_backend.full_attn_backend
        backend = type(runner_backend)
        attended = torch.zeros_like if self.gpu.has_values else torch.empty_like
        for name in ("forward", "forward_extend", "forward_decode"):
            setattr(backend, name, lambda self, q, *args, **kwargs: attended(q))
        backend.init_forward_metadata = _as_backends_begin

    def tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(10, 200) for _ in range(count)]

    def request(self, chunks: Sequence[list[int]], between: int = 0, **options: Any) -> Request:
        """A prompt whose first chunk does not follow the system prompt, so that none is exact."""
        ids, spans = [*self.system, *self.tokens(5)], []
        for chunk in chunks:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk + self.tokens(between)
        return Request(
            ids + self.tokens(QUESTION_LEN), {"spans": spans, **options}, num_top=0, max_new_tokens=self.max_new_tokens
        )

    def fused(self, num_chunks: int = 6, **options: Any) -> Request:
        """A prompt of stored chunks."""
        return self.request(self._draw.sample(self.chunks, num_chunks), **options)

    def send(self, name: str, requests: Sequence[Request]) -> list[Reply]:
        """All in one batch, run to the end and to an idle server; what they issue is a part."""
        return self._run(name, lambda: self.local.generate(requests))

    def idle(self, name: str, num_steps: int) -> None:
        """So many turns of the event loop in which nothing comes; what they issue is a part."""
        self._run(name, lambda: self.local.run(lambda step: [] if step < num_steps else None))

    def settle(self) -> None:
        """Until the tiers have written everything down."""
        tiers = self.local.cache.chunks.tiers
        while tiers.stats()["queued_write_bytes"]:
            tiers.wait(1.0)
            tiers.poll(())

    def _run(self, name: str, run: Callable[[], list[Reply]]) -> list[Reply]:
        with self.gpu.watching() as watch:
            replies = run()
        launches, views = (
            collections.Counter(str(call) for call in watch.own_operations if call.is_view == is_view)
            for is_view in (False, True)
        )
        waits = collections.Counter(watch.own_waits)
        stock = [call for call in watch.operations if call.place.startswith(STATE_KERNELS) and "." not in call.name]
        layouts = [
            call for call in watch.waits if str(call).endswith("prepare_chunk_indices _to_copy.default blocking")
        ]
        self.parts[name] = Part(
            dict(waits), dict(launches), dict(views), [one.info for one in replies], len(stock), len(layouts)
        )
        return replies


def _as_backends_begin(backend: Any, batch: Any) -> None:
    """What FA3 and Triton read of a batch on the host: it has at least one request."""
    assert batch.extend_seq_lens_cpu is None or max(batch.extend_seq_lens_cpu) >= 0


def _use_kernels_of_states() -> None:
    """SGLang's own kernels, which the CPU's platform has replaced."""
    from sglang.kernels.ops.attention.fla import chunk
    from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d

    from unit.kernels import state_kernels

    state_kernels.make_callable()
    gdn_triton.chunk_gated_delta_rule = chunk.chunk_gated_delta_rule
    gdn_backend.causal_conv1d_fn = causal_conv1d.causal_conv1d_fn
    gdn_backend.fused_gdn_gating = fused_gdn_gating


def remember(fake: Fake) -> None:
    """Chunks are computed and remembered: alone, several in a prompt, and beside reused ones."""
    for i, chunk in enumerate(fake.chunks[:8]):
        fake.send(f"observed alone {i}", [fake.request([chunk])])
    fake.send("observed together", [fake.request(fake.chunks[8:])])
    fake.send("observed in a batch", [fake.request([fake.tokens(40), fake.tokens(50)]) for _ in range(4)])
    fake.send("observed beside reused ones", [fake.request([*fake.chunks[:3], fake.tokens(40), *fake.chunks[3:5]])])


def case_methods(fake: Fake) -> None:
    """Fused batches of every method."""
    from chunk_cache.methods import METHODS

    remember(fake)
    for name, options in OPTIONS.items():
        for method in CHOOSE_DIFFERENTLY if name else METHODS:
            for size in (1, 8):
                requests = [fake.fused(method=method, ratio=0.15, **options) for _ in range(size)]
                fake.send(f"{method}{name} {size}", requests)


def case_states(fake: Fake) -> None:
    """Passages of a model with states: computed and remembered, then reused."""
    fake.max_new_tokens = 1  # SGLang decodes states by a count of the device
    remember(fake)
    for num_chunks in PASSAGES:
        for size in (1, 8):
            requests = [fake.fused(num_chunks, ratio=0.0) for _ in range(size)]
            fake.send(f"{num_chunks} passages {size}", requests)


def case_steps(fake: Fake) -> None:
    """Long prompts in steps of `--chunked-prefill-size`, exact and fused, in pages."""
    remember(fake)
    for method in ("epic", "cache-craft", "fusionrag"):
        fake.send(f"{method} in steps", [fake.fused(12, method=method, ratio=0.4) for _ in range(2)])
    for i in range(2):
        fake.send(f"packed {i}", [fake.fused(12, method="epic", keep_tokens=200), fake.fused(6, keep_tokens=150)])
    fake.send("exact in steps", [fake.request([fake.tokens(300), fake.tokens(200), fake.tokens(150)])])


def case_store(fake: Fake) -> None:
    """What the store does by itself: promotes, refreshes, verifies; an idle server takes the time."""
    remember(fake)
    for i in range(6):
        fake.send(
            f"used {i}", [fake.fused(3, method="epic", ratio=0.2), fake.request([fake.tokens(30), fake.chunks[0]])]
        )
    # The rows that ask are single ones, so our kernel serves them, and the other request has none meanwhile.
    fake.send("a question beside others", [fake.fused(between=1, method=one) for one in ("fusionrag", "epic")])
    fake.send("beside others", [fake.fused(method=method, ratio=0.15) for method in ("epic", "a3", "full-reuse")])
    fake.send("prepared", [fake.fused(2, mode="prepare", method="full-reuse")])
    fake.idle("idle", 60)


def case_tiers(fake: Fake) -> None:
    """Chunks are written down, evicted, and come up again, layer by layer."""
    remember(fake)
    for i in range(3):
        fake.settle()
        assert fake.local.flush()
        fake.send(f"from disk {i}", [fake.fused(4, method="epic", ratio=0.2) for _ in range(2)])
    fake.settle()
    for i in range(6):
        fake.send(f"evicts {i}", [fake.request([fake.tokens(900)])])
    fake.settle()
    fake.send("from host memory", [fake.fused(4, method="epic", ratio=0.2)])


CHOOSE_DIFFERENTLY = ("epic", "cacheblend", "fusionrag", "question-drift")
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", explained": {"explain": True},
    ", in blocks": {"options": {"block_size": 8}},
    ", grouped": {"options": {"group_size": 8, "group_threshold": 2}},
    ", focused": {"options": {"focus_window": 2}},
}


@dataclass(frozen=True)
class Case:
    """What a scheduler is started with, and sent."""

    run: Callable[[Fake], None]
    config: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"


CASES = {
    "methods": Case(case_methods),
    "steps": Case(case_steps, flags={"chunked_prefill_size": 256, "page_size": 16}),
    "store": Case(
        case_store,
        {"promote_uses": 2, "refresh_uses": 3, "verify_share": 1.0},
        {"disable_overlap_schedule": True},
    ),
    "tiers": Case(
        case_tiers,
        {"tiers": {"host_bytes": "64MB", "disk": "", "loading": "layerwise"}},
        {"max_total_tokens": 4096},
    ),
    "states": Case(case_states, {"seam_len": 16}, {"dtype": "bfloat16"}, "qwen3_5"),
}


def run_apart(name: str, folder: Path) -> dict[str, Part]:
    """What each part of a case's traffic has issued, of a scheduler in a process of its own that writes to `folder`."""
    out = folder / "parts.json"
    command = [sys.executable, __file__, name, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert out.exists(), done.stderr[-4000:]
    return {part: Part(**values) for part, values in json.loads(out.read_text()).items()}


def main() -> None:
    name, folder, out = sys.argv[1:]
    case = CASES[name]
    model = make_model(case.model, Path(folder) / "model", layers=NUM_LAYERS)
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 16384, "sampling_backend": "pytorch"}
    config = dict(case.config)
    if "tiers" in config:
        config["tiers"] |= {"disk": str(Path(folder) / "disk")}
    local = LocalScheduler(model, chunk_cache={"config": config}, **flags | case.flags)
    with FakeGpu.there() as gpu:
        fake = Fake(gpu, local)
        case.run(fake)
    Path(out).write_text(json.dumps({name: asdict(part) for name, part in fake.parts.items()}))
    sys.stdout.flush()
    os._exit(0)  # of threads that SGLang started


if __name__ == "__main__":
    main()
