"""Time attention_mass against the attention matrix written out, and against attention of the same rows.

    python benchmark/kernel/bench_attention_mass.py
    python benchmark/kernel/bench_attention_mass.py --q-heads 32 --kv-heads 8 --head-dim 128 --kv-len 32768

One request of `--kv-len` keys; the last `--num-rows` rows ask (a chunk that is computed, or a question), and the keys
are eight segments. `matrix` computes softmax(q k) of all rows and heads at once and adds it up; `attention` is torch's
scaled_dot_product_attention of the same rows, which multiplies by V as well and tells no masses. The op's tests run
first; nothing is timed if one fails.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
from harness import bandwidth, finish, flop_rate, measure, parser, peak_bytes, prepare
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.attention_mass.naive import attention_mass_reference

NUM_SEGMENTS = 8
NOTES = (
    "Milliseconds, median. *floor*: one product of q and k over the visible pairs at the measured rate, or K read once",
    "at the measured bandwidth, whichever is more. Memory in MB, beside the inputs.",
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0], q_heads=12, kv_heads=12, head_dim=64, kv_len=4096)
    made.add_argument("--num-rows", type=int, nargs="+", default=[1, 32, 512, 2048])
    args = made.parse_args(argv)
    if max(args.num_rows) > args.kv_len:
        made.error(f"--num-rows: {max(args.num_rows)} rows of {args.kv_len} keys")
    return args


def run_matrix(
    q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, starts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("rhd,khd->hrk", q, k).float() * q.shape[2] ** -0.5
    scores.masked_fill_(torch.arange(k.shape[0], device=q.device) > rows[:, None], float("-inf"))
    weights = torch.softmax(scores, -1).mean(0)
    bounds = [*starts, k.shape[0]]
    sums = [weights[:, a:b].sum(1) for a, b in itertools.pairwise(bounds)]
    return weights.sum(0), torch.stack(sums, 1)


def run_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(k.shape[0], device=q.device) <= rows[:, None]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device, dtype, about = prepare(args, "attention_mass")
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(args.kv_len, args.kv_heads, args.head_dim, generator=rng).to(device, dtype) for _ in range(2))
    starts = [i * args.kv_len // NUM_SEGMENTS for i in range(NUM_SEGMENTS)]
    copied, rate = bandwidth(device), flop_rate(device, dtype)
    scale = args.head_dim**-0.5
    results = []
    for num_rows in args.num_rows:
        rows = torch.arange(args.kv_len - num_rows, args.kv_len, device=device)
        q = torch.randn(num_rows, args.q_heads, args.head_dim, generator=rng).to(device, dtype)
        candidates = {
            "mass": lambda q=q, rows=rows: attention_mass(
                q, k, rows, sm_scale=scale, segment_starts=starts, backend=args.backend
            ),
            "matrix": lambda q=q, rows=rows: run_matrix(q, k, rows, starts),
            "attention": lambda q=q, rows=rows: run_attention(q, k, v, rows),
        }
        few = slice(0, min(num_rows, 4))  # the definition is slow
        expected = attention_mass_reference(q[few], k, rows[few], sm_scale=scale, segment_starts=starts)
        found = attention_mass(q[few], k, rows[few], sm_scale=scale, segment_starts=starts, backend=args.backend)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-4)
        ms = measure(candidates, repeat=args.repeat, device=device)
        flops = 2 * float((rows + 1).sum()) * args.q_heads * args.head_dim
        results.append(
            {
                "rows": num_rows,
                "attention_mass": ms["mass"].median,
                "best": ms["mass"].best,
                "floor": 1e3 * max(flops / rate, k.numel() * dtype.itemsize / copied),
                "matrix": ms["matrix"].median,
                "attention": ms["attention"].median,
                "x matrix": ms["matrix"].median / ms["mass"].median,
                "x attention": ms["attention"].median / ms["mass"].median,
                "MB": peak_bytes(candidates["mass"], device) / 1e6,
                "MB matrix": peak_bytes(candidates["matrix"], device) / 1e6,
            }
        )
    shape = f"{args.q_heads}/{args.kv_heads} heads x {args.head_dim}, {args.kv_len} keys"
    report = about | {"shape": shape, "gigabytes_per_s": copied / 1e9, "gigaflops": rate / 1e9, "results": results}
    finish(args, "attention_mass", "Softmax mass of rows on keys and segments", report, NOTES)


if __name__ == "__main__":
    main()
