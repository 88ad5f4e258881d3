"""Compares ratio 1.0 with stock SGLang on a GPU, in bf16: the cases of the exactness matrix on every backend.

    python benchmark/gpu/exactness.py [--fp8] [--backends fa3,triton] [--device cuda] [--cases NAME...] [--out FOLDER]

In bf16 two ways of computing the same prompt differ by rounding, even stock's whole and chunked prefill. So the
difference of log-probabilities between ours and stock may be at most `FACTOR` times stock's own noise: the largest
difference between two situations of stock on the same backend and KV pool, such as steps of 64 tokens or none. Tokens
are compared up to the first that differs, whose two candidates must be almost equally likely. `--device cpu` is a
rehearsal.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "test"))

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result

from exactness.cases import CASES
from exactness.runner import Config, run_cases

FACTOR = 2.0
# Heads of 64, which every backend supports.
BASE = Config(hidden=256, max_total_tokens=8192)
SITUATIONS = {
    "page 1, whole": {"page_size": 1},
    "page 1, steps of 64": {"page_size": 1, "chunked": True},
    "page 16, steps of 64": {"page_size": 16, "chunked": True},
    "page 16, whole, prefill graphs": {"page_size": 16},
}
POOLS = {
    "bfloat16": BASE,
    "float8_e4m3fn": replace(BASE, kind="llama_fp8_kv"),  # the checkpoint asks for FP8, with scales
    "float8_e5m2": replace(BASE, server=(("kv_cache_dtype", "fp8_e5m2"),)),
}


def configs_of(backend: str, pool: str, device: str) -> dict[str, Config]:
    """Configurations of a backend and a KV pool, by their names in tables."""
    without_graphs = (("disable_cuda_graph", True),)
    base = POOLS[pool]
    server = (
        *base.server,
        ("attention_backend", backend),
        ("dtype", "bfloat16"),
        ("device", device),
        ("sampling_backend", "pytorch"),
    )
    options = (("attention", "runs"),) if device == "cpu" else ()
    return {
        name: replace(base, options=options, server=(*server, *(() if "graphs" in name else without_graphs)), **fields)
        for name, fields in SITUATIONS.items()
        if device != "cpu" or "graphs" not in name
    }


def difference(ours: list[Any], stock: list[Any]) -> tuple[float, int]:
    """The largest difference of log-probabilities up to the first differing token, and how many requests differ.

    At a differing token: how much more likely the first side found its own choice than the other side's.
    """
    largest, parted = 0.0, 0
    for mine, theirs in zip(ours, stock, strict=True):
        pairs = zip(mine.input_logprobs, theirs.input_logprobs, strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs if a is not None and b is not None)])
        for i, (a, b) in enumerate(zip(mine.output_ids, theirs.output_ids, strict=True)):
            if a != b:
                parted += 1
                largest = max(largest, mine.logprobs[i] - mine.top_logprobs[i].get(b, -100.0))
                break
            largest = max(largest, abs(mine.logprobs[i] - theirs.logprobs[i]))
    return largest, parted


def measure(backend: str, pool: str, device: str, cases: list[str]) -> list[dict[str, Any]]:
    """One row per situation of a backend and a KV pool."""
    configs = configs_of(backend, pool, device)
    rows = []
    stock_of: dict[str, Any] = {}
    for name, config in configs.items():
        began = time.perf_counter()
        row: dict[str, Any] = {"backend": backend, "pool": pool, "situation": name, "cases": len(cases)}
        try:
            stock_of[name] = stock = run_cases(config, is_ours=False, names=cases)
            ours = run_cases(config, is_ours=True, names=cases)
            errors = [f"{side}, {case}: {found[case]}" for side, found in (("stock", stock), ("ours", ours))
                      for case in cases if isinstance(found[case], str)]  # fmt: skip
            differences = [difference(ours[case], stock[case]) for case in cases if not errors]
            noise = [difference(stock[case], other[case]) for other in stock_of.values() for case in cases]
            row |= {
                "requests": sum(len(ours[case]) for case in cases if not isinstance(ours[case], str)),
                "difference": max((one for one, _ in differences), default=None),
                "parted": sum(times for _, times in differences),
                "stock_noise": max(one for one, _ in noise),
                "errors": errors,
            }
        except RuntimeError as error:
            row |= {"requests": 0, "difference": None, "parted": 0, "stock_noise": None, "errors": [str(error)]}
        row["seconds"] = round(time.perf_counter() - began, 1)
        rows.append(row)
        print(backend, pool, name, row["difference"], row["stock_noise"], row["errors"], flush=True)
    # The noise of a backend on a pool is the largest over its situations.
    noise = max((row["stock_noise"] or 0.0 for row in rows), default=0.0)
    for row in rows:
        row["met"] = not row["errors"] and row["difference"] <= FACTOR * noise
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backends", default="fa3,triton", help="attention backends, with commas (default: %(default)s)"
    )
    parser.add_argument("--fp8", action="store_true", help="KV pools in FP8, of the kinds that the backend reads")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="names of cases (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "gpu", help="folder of the results")
    args = parser.parse_args()
    from sglang_chunk_cache.start.pool_check import NOT_READ  # imports SGLang, which spawned processes need not do

    rows = [
        row
        for backend in args.backends.split(",")
        for pool in POOLS
        if pool.startswith("float8") == args.fp8 and pool not in NOT_READ.get(backend, ())
        for row in measure(backend, pool, args.device, args.cases)
    ]
    header = (
        "backend",
        "KV",
        "situation",
        "requests",
        "ours to stock",
        "stock's own noise",
        "tokens parted",
        "holds",
        "s",
    )
    cells = [
        (
            row["backend"],
            row["pool"],
            row["situation"],
            row["requests"],
            "" if row["difference"] is None else f"{row['difference']:.4f}",
            "" if row["stock_noise"] is None else f"{row['stock_noise']:.4f}",
            row["parted"],
            "yes" if row["met"] else "no",
            row["seconds"],
        )
        for row in rows
    ]
    report = {**describe_run(), "device": args.device, "rows": rows}
    lines = ["# Exactness in bf16", "", *run_markdown(report), f"- device: {args.device}", ""]
    lines += ["Largest difference of log-probabilities, ratio 1.0.", "", *markdown_table(header, cells)]
    lines += [
        f"\n{row['backend']}, {row['pool']}, {row['situation']}:\n\n```\n{e[-3000:]}\n```"
        for row in rows
        for e in row["errors"]
    ]
    write_result(args.out, "exactness_fp8" if args.fp8 else "exactness", report, lines)
    print("\n".join(lines))
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
