"""Times the kernels on a GPU: attention of scattered rows by tile, against a full prefill; copies of chunks; masses.

    python benchmark/kernel/time_on_gpu.py                      # Llama-3.1-8B's shape, 8k to 32k
    python benchmark/kernel/time_on_gpu.py --sweep              # every tile of the list, to choose from
    python benchmark/kernel/time_on_gpu.py --sweep --prompts 16384 --shares 0.15 --tiles 128,64,8,3 64,64,4,3
    python benchmark/kernel/time_on_gpu.py --quick              # short prompts; on a CPU it shows that all runs
    python benchmark/kernel/time_on_gpu.py --ops mass           # of a question and a chunk, 8k to 128k

`full` is the attention that stock computes: a causal prefill of the whole prompt, by the faster of torch's flash
attention and cuDNN's, with dense K and V. Rows are `scattered` (drawn evenly) or in `blocks` of 16. Times of attention
are of one layer; all are medians of triton.testing.do_bench, which keeps the caches cold. The result of each tile is
first compared with torch's masked attention; a tile that does not compile, or differs, has a note instead of a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "sgl-kernel-ext"))

import torch
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext import RotarySpec, copy_rotate, sparse_extend
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.question_mass import Questions, question_mass
from sgl_kernel_ext.rotary import default_inv_freq

BLOCK_LEN = 16
# Tiles that fit sm_90's registers at head_dim 128.
TILES = [
    (*shape, stages)
    for shape in ((64, 32, 4), (64, 64, 4), (64, 128, 8), (128, 32, 8), (128, 64, 8), (128, 128, 8))
    for stages in (2, 3)
]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    add("--kv-dtype", choices=["float8_e4m3fn", "float8_e5m2"], help="default: that of q")
    add("--q-heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--num-layers", type=int, default=32, help="of copies (default: %(default)s)")
    add("--prompts", type=int, nargs="+", default=[8192, 16384, 32768])
    add("--mass-prompts", type=int, nargs="+", default=[8192, 32768, 131072])
    add("--shares", type=float, nargs="+", default=[0.05, 0.15])
    add("--rows", nargs="+", default=["scattered", "blocks"], choices=["scattered", "blocks"])
    add("--sweep", action="store_true", help="try tiles, not only the kernel's choice")
    add("--tiles", nargs="+", metavar="M,N,WARPS,STAGES", help="of a sweep (default: 12 of them)")
    add("--ops", nargs="+", default=["attention", "copies", "mass", "deviation"])
    add("--milliseconds", type=int, default=60, help="of repetitions for each time (default: %(default)s)")
    add("--quick", action="store_true", help="short prompts, few layers, masses at 8k")
    add("--out", type=Path, default=RESULTS_DIR / "kernel", metavar="DIR", help="folder of the results")
    args = made.parse_args(argv)
    if args.quick:
        args.prompts, args.mass_prompts, args.num_layers, args.milliseconds = [256], [8192], 2, 20
    return args


class Bench:
    """Makes tensors of one shape on a device, and times calls."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.dtype = getattr(torch, args.dtype)
        self.kv_dtype = getattr(torch, args.kv_dtype or args.dtype)
        self.has_triton = self.device.type == "cuda"
        self.rng = torch.Generator(self.device).manual_seed(0)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.rng, device=self.device, dtype=torch.float32).to(self.dtype)

    def ms(self, run: Callable[[], object]) -> float:
        """Milliseconds of one call: the median with cold caches; on a CPU of a single call."""
        if self.has_triton:
            from triton.testing import do_bench

            half = self.args.milliseconds // 2
            return float(do_bench(run, warmup=half, rep=self.args.milliseconds, return_mode="median"))
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3


def choose_rows(kind: str, share: float, prompt: int) -> torch.Tensor:
    """Ascending positions of a share of the prompt's tokens, always with the last."""
    unit = BLOCK_LEN if kind == "blocks" else 1
    num_units = max(1, round(share * prompt / unit))
    units = torch.randperm(prompt // unit - 1, generator=torch.Generator().manual_seed(1))[: num_units - 1]
    units = torch.cat([units, torch.tensor([prompt // unit - 1])]).sort().values
    return (units[:, None] * unit + torch.arange(unit)).flatten()


def attention(bench: Bench) -> Iterator[dict[str, Any]]:
    args, device = bench.args, bench.device
    scale = args.head_dim**-0.5
    for prompt in args.prompts:
        pages = torch.randperm(2 * prompt // BLOCK_LEN, generator=torch.Generator().manual_seed(0))
        slots = (pages[:, None] * BLOCK_LEN + torch.arange(BLOCK_LEN)).flatten()[:prompt].to(device)
        k, v = (bench.normal(2 * prompt, args.kv_heads, args.head_dim).to(bench.kv_dtype) for _ in range(2))
        q = bench.normal(prompt, args.q_heads, args.head_dim)
        dense = [t.transpose(0, 1)[None] for t in (q, *(raw_rows(t, slots).to(bench.dtype) for t in (k, v)))]
        dense = [t.contiguous() for t in dense]
        times = dict(full_prefill(bench, dense))
        yield from ({"op": name, "prompt": prompt, "variant": "all rows", "ms": ms} for name, ms in times.items())
        full = min(times.values())
        for kind in args.rows:
            for share in args.shares:
                rows = choose_rows(kind, share, prompt).to(device)
                index = [torch.tensor([0, n], device=device) for n in (prompt, len(rows))]
                call = (q[rows], k, v, index[0], slots, index[1], rows)
                about = {"op": "sparse_extend", "prompt": prompt, "rows": kind, "share": share}
                flops = 4 * float((rows + 1).sum()) * args.q_heads * args.head_dim
                looked_at = torch.arange(len(rows), device=device)
                looked_at = torch.cat([looked_at[:256], looked_at[256:][-256:]])
                expected = masked(dense, rows[looked_at])
                for name, run in candidates(bench, call, scale):
                    found: dict[str, Any] = about | {"variant": name, "ms": None, "full ms": full}
                    try:
                        error = float((run()[looked_at].float() - expected.float()).abs().max())
                        if not error < 3e-2:
                            raise ValueError(f"off by {error:.3g}")
                        ms = bench.ms(run)
                        found |= {"ms": ms, "x full": full / ms, "TFLOP/s": flops / ms / 1e9, "note": f"{error:.1e}"}
                        found |= {"host ms": time_on_host(bench, run)}
                    except Exception as problem:  # noqa: BLE001  a tile that does not compile is a result
                        found |= {"note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"}
                    yield found


def full_prefill(bench: Bench, dense: list[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """(implementation, milliseconds) of a causal prefill, for each that torch has on this device."""
    grouped = dense[0].shape[1] != dense[1].shape[1]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                run = functools.partial(scaled_dot_product_attention, *dense, is_causal=True, enable_gqa=grouped)
                yield backend.name.lower(), bench.ms(run)
        except RuntimeError as problem:
            print(f"{backend.name}: {str(problem).splitlines()[0][:100]}", flush=True)


def raw_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a buffer; fp8 is indexed as bytes."""
    if buffer.dtype.itemsize == 1:
        return buffer.view(torch.uint8)[slots].view(buffer.dtype)
    return buffer[slots]


def masked(dense: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Attention of the given rows, by torch with a mask."""
    q, k, v = dense
    mask = torch.arange(k.shape[2], device=rows.device) <= rows[:, None]
    out = scaled_dot_product_attention(q[:, :, rows], k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def candidates(bench: Bench, call: tuple, scale: float) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    if not bench.has_triton:
        yield "torch", lambda: sparse_extend(*call, sm_scale=scale, backend="torch")
        return
    from sgl_kernel_ext.sparse_extend.tiling import Tile
    from sgl_kernel_ext.sparse_extend.triton import sparse_extend_triton

    yield "triton", lambda: sparse_extend(*call, sm_scale=scale, backend="triton")
    if bench.args.sweep:
        given = [tuple(int(n) for n in tile.split(",")) for tile in bench.args.tiles or ()]
        for numbers in given or TILES:
            out = torch.empty_like(call[0])

            def run(numbers: tuple[int, ...] = numbers, out: torch.Tensor = out) -> torch.Tensor:
                sparse_extend_triton(*call, out, sm_scale=scale, tile=Tile(*numbers))
                return out

            yield " x ".join(map(str, numbers)), run


def copies(bench: Bench) -> Iterator[dict[str, Any]]:
    args, device = bench.args, bench.device
    num_tokens = 512
    size = 8 * num_tokens, args.kv_heads, args.head_dim
    pools = [[bench.normal(*size).to(bench.kv_dtype) for _ in range(args.num_layers)] for _ in "kv"]
    spec = RotarySpec(args.head_dim, True, default_inv_freq(500_000.0, args.head_dim)).to(device)
    delta = torch.full((num_tokens,), 1234, device=device)
    num_bytes = 4 * args.num_layers * num_tokens * args.kv_heads * args.head_dim * bench.kv_dtype.itemsize
    for kind, unit in (("a run", num_tokens), ("pages of 16", 16), ("scattered", 1)):
        units = torch.randperm(size[0] // unit, generator=torch.Generator().manual_seed(0))
        slots = (units[:, None] * unit + torch.arange(unit)).flatten()[: 2 * num_tokens].to(device)
        src, dst = slots[:num_tokens].clone(), slots[num_tokens:].clone()
        ms = bench.ms(lambda: copy_rotate(*pools, src, dst, delta, spec))  # noqa: B023
        host = time_on_host(bench, lambda: copy_rotate(*pools, src, dst, delta, spec))  # noqa: B023
        about = {"op": "copy_rotate", "rows": kind, "variant": f"{num_tokens} tokens, {args.num_layers} layers"}
        yield about | {"ms": ms, "GB/s": num_bytes / ms / 1e6, "host ms": host}


def time_on_host(bench: Bench, run: Callable[[], object]) -> float:
    """Milliseconds until a call returns to the host: the shortest of several."""
    times = []
    for _ in range(20 if bench.has_triton else 2):
        if bench.has_triton:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def mass(bench: Bench) -> Iterator[dict[str, Any]]:
    """Attention mass: of a question's rows at all heads of all layers, of a chunk's at two heads by segment."""
    args, device = bench.args, bench.device
    num_rows, num_layers, scale = 32, args.num_layers, args.head_dim**-0.5
    for prompt in args.mass_prompts:
        k = bench.normal(prompt, args.kv_heads, args.head_dim).to(bench.kv_dtype)
        slots = torch.randperm(prompt, generator=torch.Generator().manual_seed(0)).to(device)
        asked = Questions([0], [num_rows], [prompt - num_rows], [prompt], slots)
        q = bench.normal(num_layers, num_rows, args.q_heads, args.head_dim)
        of_question = functools.partial(question_mass, q, [k.clone() for _ in range(num_layers)], asked, sm_scale=scale)
        of_two = raw_rows(k.transpose(0, 1), torch.arange(2, device=device)).transpose(0, 1).contiguous()
        rows = torch.arange(prompt - 512, prompt, device=device)
        of_chunk = functools.partial(
            *(attention_mass, bench.normal(512, 2, args.head_dim), of_two, rows),
            sm_scale=scale,
            segment_starts=list(range(0, prompt, max(1, prompt // 8))),
        )
        for op, what, variant, run in (
            ("question_mass", "a question", f"{num_rows} x {args.q_heads}, {num_layers} layers", of_question),
            ("attention_mass", "a chunk", "512 x 2", of_chunk),
        ):
            about = {"op": op, "prompt": prompt, "rows": what, "variant": variant}
            yield about | {"ms": bench.ms(run), "host ms": time_on_host(bench, run)}


def deviation(bench: Bench) -> Iterator[dict[str, Any]]:
    args = bench.args
    for prompt in args.prompts:
        size = prompt, args.kv_heads, args.head_dim
        new = [bench.normal(*size) for _ in range(2)]
        old = [bench.normal(*size).to(bench.kv_dtype) for _ in range(2)]
        slots = torch.randperm(prompt, generator=torch.Generator().manual_seed(0)).to(bench.device)
        ms = bench.ms(lambda: kv_deviation(*new, *old, slots=slots))  # noqa: B023
        num_bytes = sum(tensor.nbytes for tensor in (*new, *old))
        yield {"op": "kv_deviation", "prompt": prompt, "ms": ms, "GB/s": num_bytes / ms / 1e6}


OPS = {"attention": attention, "copies": copies, "mass": mass, "deviation": deviation}
COLUMNS = ("op", "prompt", "rows", "share", "variant", "ms", "full ms", "x full", "TFLOP/s", "GB/s", "host ms", "note")


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    bench = Bench(args)
    results, cells = [], []
    for op in args.ops:
        for row in OPS[op](bench):
            results.append(row)
            values = [row.get(name) for name in COLUMNS]
            cells.append(["" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x) for x in values])
            print(" | ".join(cells[-1]), flush=True)
    shape = f"{args.q_heads}/{args.kv_heads} heads x {args.head_dim}, {args.dtype}, {args.kv_dtype or args.dtype} KV"
    report = describe_run() | {"shape": shape, "gpu": gpu_name(bench.device), "results": results}
    lines = ["# Kernels on a GPU", "", *run_markdown(report), f"- {shape}, on {report['gpu']}", ""]
    paths = write_result(args.out, "gpu", report, [*lines, *markdown_table(COLUMNS, cells)])
    print(json.dumps({"written": [str(path) for path in paths]}))


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


if __name__ == "__main__":
    main()
