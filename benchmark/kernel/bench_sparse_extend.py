"""Time sparse_extend against a full causal prefill by torch's scaled_dot_product_attention, side by side.

    python benchmark/kernel/bench_sparse_extend.py --threads 2 --out results.json

One request of `--kv-len` positions in scattered pages; a share of its positions is computed. `scattered` rows are drawn
evenly, `tail` rows are the last ones (a question, a missing chunk). The baseline gathers the same K and V and computes
every row. The op is compared with its float64 definition first; nothing is timed if that fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_report import describe_machine, measure, print_table, write_json
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext import sparse_extend
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference

PAGE_LEN = 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "triton"])
    parser.add_argument("--q-heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--kv-len", type=int, default=4096)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.15, 0.3, 0.5, 1.0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's choice")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    return parser.parse_args()


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


def self_check(x: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
    for kind in ("scattered", "tail"):
        rows = choose_rows(kind, 0.1, args.kv_len).to(x["q"].device)
        result = run_rows(x, rows, x["q"][rows], args)
        bounds = [0, args.kv_len], [0, rows.numel()]
        expected = sparse_extend_reference(
            x["q"][rows], x["k"], x["v"], bounds[0], x["slots"], bounds[1], rows, sm_scale=args.head_dim**-0.5
        )
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    x = make_inputs(args, device, dtype)
    self_check(x, args)
    machine = describe_machine(device)
    print(f"{machine}\n{args.q_heads}/{args.kv_heads} heads x {args.head_dim}, {args.kv_len} keys, {dtype}")

    results = []
    for kind in ("scattered", "tail"):
        for share in args.shares:
            rows = choose_rows(kind, share, args.kv_len).to(device)
            q = x["q"][rows]
            candidates = {
                "rows": lambda rows=rows, q=q: run_rows(x, rows, q, args),
                "full": lambda: run_full(x),
            }
            ms = measure(candidates, repeat=args.repeat, device=device)
            # The scores these rows need, as a share of those of the full prefill: what an ideal kernel would take.
            needed = float((rows + 1).sum()) / (args.kv_len * (args.kv_len + 1) / 2)
            results.append(
                {
                    "rows": kind,
                    "share": share,
                    "num_rows": rows.numel(),
                    "ms": ms["rows"].median,
                    "full_ms": ms["full"].median,
                    "speedup": ms["full"].median / ms["rows"].median,
                    "best_ms": ms["rows"].best,
                    "best_full_ms": ms["full"].best,
                    "best_speedup": ms["full"].best / ms["rows"].best,
                    "ideal_speedup": 1 / needed,
                }
            )
    print_table(list(results[0]), [list(row.values()) for row in results])
    if args.out:
        shape = {"q_heads": args.q_heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "kv_len": args.kv_len}
        write_json(args.out, {"machine": machine, "dtype": str(dtype), "shape": shape, "results": results})


if __name__ == "__main__":
    main()
