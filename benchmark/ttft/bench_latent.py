"""Latent attention (MLA) beside grouped heads: bytes that a reused token takes, and time to first token against stock.

    python benchmark/ttft/bench_latent.py [--quick] [--repeats N] [--out FOLDER]

Two models of equal depth and width with random weights: Llama's attention with grouped heads, and DeepSeek-V2's with
dense layers in the place of its experts. Each is measured like `bench_ttft.py`: stock is `"mode": "off"` on the same
server. Bytes are what the host tier counts for the chunks that it holds. Results: `benchmark/results/ttft/latent.*`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import LATENT_RANK, LATENT_ROTATED, make_latent, make_llama
from benchmark.common.results import describe_run, markdown_table, result_dir, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.ttft.measure import METHODS, SYSTEMS, time_reuse
from benchmark.ttft.workload import FULL, QUICK, Size, Workload

SIDES = ("grouped", "latent")


def measure(model_dir: Path, size: Size, repeats: int, name: str) -> dict[str, Any]:
    """Rows of `time_reuse`, and bytes per stored token."""
    tokens = -(-size.prompt_len * (repeats + 3) // 1024) * 1024
    config = json.dumps({"tiers": {"host_bytes": "2GB", "controller": False}})
    flags = ["--chunk-cache", "--skip-tokenizer-init", "--max-total-tokens", str(tokens)]
    flags += ["--chunk-cache-config", config]
    work = Workload(size, 0)
    with Server(model_dir, *flags, env=offline_env(), log_path=CACHE_DIR / f"server-{name}.log") as server:
        print(f"{name}: server started in {server.start_s:.0f} s", flush=True)
        systems = [SYSTEMS[0], *METHODS[1:]]
        rows = time_reuse(server, work, systems, repeats, lambda text: print(f"  {text}", flush=True))
        time.sleep(3)  # what is copied down
        tiers = server.get("/chunk_cache/stats").json()["ranks"][0]["tiers"]
    tokens = tiers["pool"]["tokens"]
    assert tiers["host"]["entries"] == size.num_chunks, "every chunk was copied down"
    return {
        "rows": rows,
        "bytes_per_token_pool": tiers["pool"]["bytes"] // tokens,
        "bytes_per_token_host": tiers["host"]["bytes"] // tokens,
    }


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    lines = ["# Latent attention beside grouped heads", "", *run_markdown(report), f"- prompt: {report['prompt']}"]
    lines += [f"- {name}: {report[name]['model']}" for name in ("grouped", "latent")]
    sizes = [
        (what, *(report[side][f"bytes_per_token_{key}"] for side in SIDES))
        for key, what in (("pool", "bytes of a token in the KV pool"), ("host", "bytes of a token in host memory"))
    ]
    lines += ["", *markdown_table(["", "grouped heads", "latent"], sizes)]
    lines += [
        "",
        "Seconds of the whole request of one token: median (min-max), and against stock on the same server.",
        "",
    ]
    times = []
    for pair in zip(*(report[side]["rows"] for side in SIDES), strict=True):
        cells = []
        for row in pair:
            spread = row["seconds"]
            cells += [f"{spread['median']:.3f} ({spread['min']:.3f}-{spread['max']:.3f})", f"{row['speedup']:.1f}x"]
        times.append((pair[0]["system"], *cells))
    lines += markdown_table(["system", "grouped heads", "", "latent", ""], times)
    return lines


def main() -> int:
    leave_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and prompts: a check, no result")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = describe_run()
    size = QUICK if args.quick else FULL
    size = replace(size, shape=replace(size.shape, kv_heads=size.shape.heads // 3 or 1))
    shape = size.shape
    name = f"{shape.layers}x{shape.hidden}"
    report: dict[str, Any] = {**run, "prompt": str(size)}
    for side, folder in (
        ("grouped", make_llama(CACHE_DIR / f"llama-{name}-{shape.kv_heads}kv", shape)),
        ("latent", make_latent(CACHE_DIR / f"latent-{name}", shape)),
    ):
        report[side] = measure(folder, size, args.repeats, side)
    report["grouped"]["model"] = f"{shape}, {shape.kv_heads} heads of K and V"
    report["latent"]["model"] = (
        f"DeepSeek-V2's class without experts, rows of {LATENT_RANK} and {LATENT_ROTATED} rotated"
    )
    for path in write_result(result_dir(args, "ttft"), "latent", report,
                             to_markdown(report)):  # fmt: skip
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
