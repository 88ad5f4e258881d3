"""Time a whole forward of a Llama-shaped model: every token, or moved chunks and a share of their rows.

    python benchmark/kernel/bench_forward.py
    python benchmark/kernel/bench_forward.py --tokens 8192 --ratios 0.05 0.15 --dtype bfloat16

The prompt is eight stored chunks and a question; the weights are random. `full` is a causal prefill by torch's
scaled_dot_product_attention. Ratio r copies the chunks' keys and values to the request's slots (`copy_rotate`, all
layers) and sends the question and a share r of the chunks' rows, drawn evenly, through all layers (`sparse_extend`).
Both write their K and V into pages and end with the logits of the last row. Shapes are those of an 8B model where
there is a GPU, small ones elsewhere. The tests of sparse_extend run first. Then ratio 1 must reproduce the prefill, and
moved keys the prefill's keys of layer 0; nothing is timed otherwise.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from harness import bandwidth, finish, flop_rate, measure, parser, peak_bytes, prepare
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from sgl_kernel_ext import RotarySpec, copy_rotate, sparse_extend
from sgl_kernel_ext.rotary import default_inv_freq, rotate, rotation_table
from sgl_kernel_ext.sparse_extend import IndPtr

NUM_CHUNKS = 8
KINDS = ("copy_rotate", "attention", "linear")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the length of a vector
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LARGE = {"num_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336}
SMALL = {"num_layers": 4, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "mlp": 3072}
NOTES = (
    "*forward*: milliseconds, median. *floor*: products and visible pairs at the measured rate, or the weights read",
    "once, whichever is more, and the copies at the measured bandwidth. *bound*: 1/(r + 1/L), for r of the rows and",
    "one full layer of L, which methods pay that choose rows during the forward. Here rows are given, so *of bound*",
    "may pass 1 where L is small; the question counts as work. Percent of one more run with timers: moving K and V,",
    "attention, products with weights; the rest is norms, rotation and writes. MB: the peak beside weights and slots.",
)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of layer, q, k, v


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    is_large = torch.cuda.is_available()
    shape = LARGE if is_large else SMALL
    made = parser(__doc__.splitlines()[0], **shape, vocabulary=32_000, question=64, page_len=16)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768] if is_large else [2048, 4096])
    made.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.05, 0.15, 0.3, 1.0])
    made.add_argument("--full-attention", choices=list(KERNELS), default="flash", help="of the prefill, on a GPU")
    made.set_defaults(repeat=3)
    args = made.parse_args(argv)
    for num_tokens in args.tokens:
        if num_tokens <= args.question or (num_tokens - args.question) % NUM_CHUNKS:
            made.error(f"--tokens: {num_tokens} must be the question ({args.question}) and {NUM_CHUNKS} equal chunks")
    return args


class Clock:
    """Milliseconds by kind of work; on a GPU by events, so that nothing waits for it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        start = self._mark()
        yield
        self.marks.append((kind, start, self._mark()))

    def sum(self, kind: str) -> float:
        marks = [(start, end) for name, start, end in self.marks if name == kind]
        if self.device.type != "cuda":
            return 1e3 * float(sum(end - start for start, end in marks))
        torch.cuda.synchronize(self.device)
        return float(sum(start.elapsed_time(end) for start, end in marks))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Prompt:
    """Stored chunks and a question; all on the device."""

    tokens: torch.Tensor  # [num_tokens]
    stored: torch.Tensor  # [num_reused], slots of the chunks
    stored_positions: torch.Tensor  # [num_reused]
    slots: torch.Tensor  # [num_tokens], the request's
    positions: torch.Tensor  # [num_tokens], 0, 1, ..

    @property
    def num_reused(self) -> int:
        return self.stored.numel()

    def choose_rows(self, ratio: float) -> torch.Tensor:
        """Positions to compute: a share of the chunks' and the question's, ascending."""
        drawn = torch.randperm(self.num_reused, generator=torch.Generator().manual_seed(1))
        drawn = drawn[: math.ceil(ratio * self.num_reused)].sort().values
        return torch.cat((drawn.to(self.positions), self.positions[self.num_reused :]))


class Model:
    """A decoder with its pool of KV slots."""

    def __init__(self, args: argparse.Namespace, num_slots: int, device: torch.device, dtype: torch.dtype):
        rng = torch.Generator(device).manual_seed(0)

        def weight(num_out: int, num_in: int, scale: float) -> torch.Tensor:
            made = torch.randn(num_out, num_in, generator=rng, device=device, dtype=dtype)
            return made.mul_(scale * num_in**-0.5)

        self.args, self.device, self.clock = args, device, cast(Clock | None, None)
        self.spec = RotarySpec(args.head_dim, True, default_inv_freq(500_000.0, args.head_dim)).to(device)
        width, residual = args.heads * args.head_dim, (2 * args.num_layers) ** -0.5
        # of each layer: Q, K and V in one, output, gate and up in one, down
        shapes: list[tuple[int, int, float]] = [
            (width + 2 * args.kv_heads * args.head_dim, args.hidden, 1.0),
            (args.hidden, width, residual),
            (2 * args.mlp, args.hidden, 1.0),
            (args.hidden, args.mlp, residual),
        ]
        self.layers = [[weight(*shape) for shape in shapes] for _ in range(args.num_layers)]
        self.num_weights = sum(w.numel() for layer in self.layers for w in layer)
        self.embedding, self.lm_head = (weight(args.vocabulary, args.hidden, 1.0) for _ in range(2))
        ones = torch.ones(args.hidden, dtype=dtype, device=device)
        self.norm = partial(rms_norm, normalized_shape=(args.hidden,), weight=ones, eps=1e-5)
        pool = num_slots, args.kv_heads, args.head_dim
        self.k, self.v = ([torch.zeros(pool, dtype=dtype, device=device) for _ in self.layers] for _ in "kv")

    def full(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Causal prefill of tokens that see nothing but each other; returns the last row before the head."""
        is_shared = self.args.heads != self.args.kv_heads

        def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            if self.device.type == "cpu":
                q, k, v = (t.contiguous() for t in (q, k, v))  # 193 ms or 180, 4,096 tokens, 12 heads x 64, two cores
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)[0].transpose(0, 1)

        with sdpa_kernel(KERNELS[self.args.full_attention]) if self.device.type == "cuda" else nullcontext():
            return self._forward(tokens, positions, slots, attend)

    def fused(self, prompt: Prompt, rows: torch.Tensor) -> torch.Tensor:
        """Chunks moved to the request's slots, `rows` computed; returns the last row before the head."""
        bounds: list[IndPtr] = [[0, prompt.slots.numel()], [0, rows.numel()]]
        if self.device.type == "cuda":  # the Triton path reads them on the device
            bounds = [torch.tensor(b, device=self.device) for b in bounds]
        reused, backend, sm_scale = slice(prompt.num_reused), self.args.backend, self.args.head_dim**-0.5
        with self._timed("copy_rotate"):
            delta = prompt.positions[reused] - prompt.stored_positions
            copy_rotate(self.k, self.v, prompt.stored, prompt.slots[reused], delta, self.spec, backend=backend)

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv = self.k[i], self.v[i], bounds[0], prompt.slots
            return sparse_extend(q, *kv, bounds[1], rows, sm_scale=sm_scale, backend=backend)

        return self._forward(prompt.tokens[rows], rows, prompt.slots[rows], attend)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        table = [t[:, None] for t in rotation_table(self.spec, positions)]
        x = self.embedding[tokens] * self.args.hidden**0.5
        for i, (qkv, output, gate_up, down) in enumerate(self.layers):
            h = self._attention(i, self._linear(self.norm(x), qkv), table, slots, attend)
            x += self._linear(h, output)
            gate, up = self._linear(self.norm(x), gate_up).chunk(2, dim=1)
            h = silu(gate).mul_(up)
            del gate, up
            x += self._linear(h, down)
        last = self.norm(x[-1])
        self._linear(last, self.lm_head)
        return last

    def _attention(
        self, i: int, qkv: torch.Tensor, table: list[torch.Tensor], slots: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        heads, kv_heads = self.args.heads, self.args.kv_heads
        qkv = qkv.view(qkv.shape[0], -1, self.args.head_dim)
        qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        turned = torch.empty_like(qk, dtype=torch.float32)
        rotate(qk.float(), turned, table[0], table[1], self.spec)
        turned = turned.to(qk.dtype)
        q, k = turned[:, :heads], turned[:, heads:]
        self.k[i].index_copy_(0, slots, k)
        self.v[i].index_copy_(0, slots, v)
        with self._timed("attention"):
            return attend(i, q, k, v).flatten(1)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with self._timed("linear"):
            return linear(x, weight)

    def _timed(self, kind: str) -> AbstractContextManager[None]:
        return self.clock(kind) if self.clock else nullcontext()


def make_prompt(num_tokens: int, args: argparse.Namespace, device: torch.device) -> Prompt:
    rng = torch.Generator().manual_seed(num_tokens)
    num_reused, chunk_len = num_tokens - args.question, (num_tokens - args.question) // NUM_CHUNKS
    num_pages = -(-num_tokens // args.page_len)
    # Two regions of the pool, each in scattered pages: what is stored, and the request.
    pages = [torch.randperm(num_pages, generator=rng) + region * num_pages for region in range(2)]
    stored, slots = ((p[:, None] * args.page_len + torch.arange(args.page_len)).flatten() for p in pages)
    starts = 37 * torch.arange(1, NUM_CHUNKS + 1)  # so that every chunk moves by another distance, one backwards
    stored_positions = (starts[:, None] + torch.arange(chunk_len)).flatten()
    tokens = torch.randint(args.vocabulary, (num_tokens,), generator=rng)
    parts = tokens, stored[:num_reused], stored_positions, slots[:num_tokens], torch.arange(num_tokens)
    return Prompt(*(part.to(device) for part in parts))


def self_check(model: Model, prompt: Prompt) -> None:
    """Ratio 1 is the prefill, and at layer 0, where keys depend on nothing else, moved ones are computed ones."""
    reused, tolerance = prompt.slots[: prompt.num_reused], TOLERANCE[model.k[0].dtype]

    def same(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((result.double() - expected.double()).norm() / expected.double().norm())
        if not error <= tolerance:  # also where it is NaN
            raise SystemExit(f"{name}: {error:.2g} off the full prefill (at most {tolerance:g}), so nothing is timed")

    hidden = model.full(prompt.tokens, prompt.positions, prompt.slots)
    expected = [k[prompt.slots] for k in model.k]
    expected_v = model.v[0][reused]
    for buffer in (*model.k, *model.v):
        buffer[prompt.slots] = math.nan
    same("last row", model.fused(prompt, prompt.positions), hidden)
    for i, k in enumerate(expected):
        same(f"keys of layer {i}", model.k[i][prompt.slots], k)
    model.fused(prompt, prompt.choose_rows(0.0))
    same("moved keys", model.k[0][reused], expected[0][: reused.numel()])
    same("moved values", model.v[0][reused], expected_v)


def floor_of(model: Model, rows: torch.Tensor, num_copied: int, copied: float, rate: float) -> float:
    """Milliseconds at the measured rates: `copied` bytes and `rate` operations per second."""
    args, item = model.args, int(model.embedding.dtype.itemsize)
    pairs = float((rows + 1).sum()) * args.num_layers * args.heads * args.head_dim
    flops = 2 * rows.numel() * model.num_weights + 4 * pairs
    copies = 4 * num_copied * args.num_layers * args.kv_heads * args.head_dim * item
    return 1e3 * float(max(flops / rate, model.num_weights * item / copied) + copies / copied)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, dtype, about = prepare(args, "sparse_extend")
    model = Model(args, 2 * (max(args.tokens) + args.page_len), device, dtype)
    copied, rate = bandwidth(device), flop_rate(device, dtype)
    results = []
    for num_tokens in args.tokens:
        prompt = make_prompt(num_tokens, args, device)
        for part in torch.arange(prompt.num_reused, device=device).chunk(NUM_CHUNKS):
            model.full(prompt.tokens[part], prompt.stored_positions[part], prompt.stored[part])
        self_check(model, prompt)
        rows = {"full": prompt.positions} | {f"{r:g}": prompt.choose_rows(r) for r in args.ratios}
        candidates = {name: partial(model.fused, prompt, chosen) for name, chosen in rows.items()}
        candidates["full"] = partial(model.full, prompt.tokens, prompt.positions, prompt.slots)
        ms = measure(candidates, repeat=args.repeat, device=device)
        for name, run in candidates.items():
            row: dict[str, str | float] = {"r": name, "tokens": num_tokens, "rows": rows[name].numel()}
            row |= {"forward": ms[name].median, "best": ms[name].best}
            row["floor"] = floor_of(model, rows[name], 0 if name == "full" else prompt.num_reused, copied, rate)
            row["x full"] = speed_up = ms["full"].median / ms[name].median
            row["bound"] = bound = 1.0 if name == "full" else 1 / (float(name) + 1 / args.num_layers)
            row["of bound"] = speed_up / bound
            model.clock = clock = Clock(device)
            with clock("all"):
                run()
            model.clock = None
            row |= {f"% {kind}": 100 * clock.sum(kind) / clock.sum("all") for kind in KINDS}
            row["MB"] = peak_bytes(run, device) / 1e6
            results.append(row)
    shape = f"{args.num_layers} layers x {args.hidden}, {args.heads}/{args.kv_heads} heads x {args.head_dim}"
    shape += f", MLP {args.mlp}, question {args.question}, pages of {args.page_len}"
    report = about | {"shape": shape, "gigabytes_per_s": copied / 1e9, "gigaflops": rate / 1e9, "results": results}
    finish(args, "forward", "A forward with moved chunks", report, NOTES)


if __name__ == "__main__":
    main()
