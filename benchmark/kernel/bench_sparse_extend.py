"""Time sparse_extend against a full causal prefill, and against masked attention of the same rows, side by side.

    python benchmark/kernel/bench_sparse_extend.py
    python benchmark/kernel/bench_sparse_extend.py --q-heads 32 --kv-heads 8 --head-dim 128 --kv-len 32768

One request of `--kv-len` positions in scattered pages; a share of its positions is computed. `scattered` rows are drawn
evenly, `tail` rows are the last ones (a question, a missing chunk). `full` gathers the same K and V and computes every
row by torch's scaled_dot_product_attention; `masked` gathers them too and computes the same rows with a boolean mask.
The op's tests run first; nothing is timed if one fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness import TOLERANCE, bandwidth, finish, flop_rate, measure, parser, peak_bytes, prepare
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext import sparse_extend
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference

PAGE_LEN = 16
NOTES = (
    "Milliseconds, median; *x full* by the medians. *floor*: what the visible pairs take at the measured rate of",
    "products, or K, V and the rows read once at the measured bandwidth, whichever is more. Memory in MB, beside the",
    "inputs.",
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0], q_heads=12, kv_heads=12, head_dim=64, kv_len=4096)
    made.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.15, 0.3, 0.5, 1.0])
    return made.parse_args(argv)


def make_inputs(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    num_pages = -(-args.kv_len // PAGE_LEN)
    pages = torch.randperm(2 * num_pages, generator=rng)[:num_pages]
    slots = (pages[:, None] * PAGE_LEN + torch.arange(PAGE_LEN)).flatten()[: args.kv_len]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    num_slots = 2 * num_pages * PAGE_LEN
    return {
        "q": normal(args.kv_len, args.q_heads, args.head_dim),
        "k": normal(num_slots, args.kv_heads, args.head_dim),
        "v": normal(num_slots, args.kv_heads, args.head_dim),
        "slots": slots.to(device),
    }


def choose_rows(kind: str, share: float, kv_len: int) -> torch.Tensor:
    num_rows = max(1, round(share * kv_len))
    if kind == "tail":
        return torch.arange(kv_len - num_rows, kv_len)
    return torch.randperm(kv_len, generator=torch.Generator().manual_seed(1))[:num_rows].sort().values


def run_rows(x: dict[str, torch.Tensor], rows: torch.Tensor, q: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    bounds = [0, x["slots"].numel()], [0, rows.numel()]
    if q.device.type == "cuda":  # the Triton path reads them on the device
        bounds = tuple(torch.tensor(b, device=q.device) for b in bounds)
    return sparse_extend(
        q, x["k"], x["v"], bounds[0], x["slots"], bounds[1], rows, sm_scale=q.shape[2] ** -0.5, backend=args.backend
    )


def run_full(x: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (x["q"], x["k"][x["slots"]], x["v"][x["slots"]]))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def run_masked(x: dict[str, torch.Tensor], rows: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(x["slots"].numel(), device=q.device) <= rows[:, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, x["k"][x["slots"]], x["v"][x["slots"]]))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def self_check(x: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
    for kind in ("scattered", "tail"):
        rows = choose_rows(kind, 0.1, args.kv_len)[-64:].to(x["q"].device)  # the definition is slow
        q = x["q"][rows]
        result = run_rows(x, rows, q, args)
        bounds = [0, args.kv_len], [0, rows.numel()]
        expected = sparse_extend_reference(
            q, x["k"], x["v"], bounds[0], x["slots"], bounds[1], rows, sm_scale=args.head_dim**-0.5
        )
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
        masked = run_masked(x, rows, q)[0].transpose(0, 1)
        torch.testing.assert_close(masked.double(), expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, dtype, about = prepare(args, "sparse_extend")
    x = make_inputs(args, device, dtype)
    self_check(x, args)
    copied, rate = bandwidth(device), flop_rate(device, dtype)
    kv_bytes = 2 * args.kv_len * args.kv_heads * args.head_dim * dtype.itemsize
    results = []
    for kind in ("scattered", "tail"):
        for share in args.shares:
            rows = choose_rows(kind, share, args.kv_len).to(device)
            q = x["q"][rows]
            candidates = {
                "rows": lambda rows=rows, q=q: run_rows(x, rows, q, args),
                "masked": lambda rows=rows, q=q: run_masked(x, rows, q),
                "full": lambda: run_full(x),
            }
            ms = measure(candidates, repeat=args.repeat, device=device)
            flops = 4 * float((rows + 1).sum()) * args.q_heads * args.head_dim
            num_bytes = kv_bytes + 2 * q.numel() * dtype.itemsize
            floor = 1e3 * max(flops / rate, num_bytes / copied)
            results.append(
                {
                    "rows": kind,
                    "share": share,
                    "sparse_extend": ms["rows"].median,
                    "best": ms["rows"].best,
                    "floor": floor,
                    "masked": ms["masked"].median,
                    "full": ms["full"].median,
                    "x masked": ms["masked"].median / ms["rows"].median,
                    "x full": ms["full"].median / ms["rows"].median,
                    "GFLOP/s": flops / ms["rows"].best / 1e6,
                    "GFLOP/s of full": 2 * args.kv_len**2 * args.q_heads * args.head_dim / ms["full"].best / 1e6,
                    "MB": peak_bytes(candidates["rows"], device) / 1e6,
                    "MB masked": peak_bytes(candidates["masked"], device) / 1e6,
                }
            )
    shape = f"{args.q_heads}/{args.kv_heads} heads x {args.head_dim}, {args.kv_len} keys"
    report = about | {"shape": shape, "gigabytes_per_s": copied / 1e9, "gigaflops": rate / 1e9, "results": results}
    finish(args, "sparse_extend", "Attention of chosen rows", report, NOTES)


if __name__ == "__main__":
    main()
