"""Soak test: Zipf traffic for minutes over a corpus far larger than the tiers, and what must hold.

    python benchmark/tiers/soak.py [--minutes 20] [--controller] [--loading prefetch] [--out FOLDER]

10,000 chunks; the KV pool holds some 80, the host tier some 500, the disk tier some 4,000, so all of them evict.
Several clients ask at once. At intervals all of them pause, so that SGLang checks the memory of the idle server; the
check ends the server if a slot is lost. Counted: where the chunks of replies came from, and memory, threads and open
files of the scheduler. Log-probabilities are compared with mode off. Results: `benchmark/results/tiers/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import LlamaShape, make_llama
from benchmark.common.results import RESULTS_DIR, describe_run, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.tiers.loading import tier_stats
from benchmark.tiers.prompts import Corpus, Size
from benchmark.tiers.soak_report import soak_markdown, summarize
from benchmark.tiers.traffic import Traffic
from rich.console import Console

SIZE = Size(LlamaShape(4, 128, 4, 2, 256, 2048), system_len=32, chunk_len=96, num_chunks=6, question_len=16)
POOL_TOKENS, HOST_BYTES, DISK_BYTES = 8192, 100_000_000, 800_000_000
EXPONENT = 0.9
NUM_CHUNKS = 10_000
NUM_CLIENTS = 4
SAMPLE_S, INTERVAL_S = 5.0, 20.0
REST_EVERY_S, REST_S = 30.0, 1.5
SETTLE_S = 60.0  # most time that writes may take after the last request
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--controller", action="store_true", help="chunks are computed where that is faster")
    parser.add_argument("--loading", choices=("prefetch", "layerwise", "sync"), default="prefetch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="soak", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "tiers", help="folder of the result files")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when something does not hold")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Runs the soak; returns the report."""
    model_dir = make_llama(CACHE_DIR / f"llama-{SIZE.shape.layers}x{SIZE.shape.hidden}-gqa", SIZE.shape)
    corpus = Corpus(SIZE, NUM_CHUNKS, args.seed)
    tiers = {
        "host_bytes": HOST_BYTES,
        "disk": {"path": str(folder), "max_bytes": DISK_BYTES},
        "loading": args.loading,
        "controller": args.controller,
    }
    flags = ["--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS)]
    report: dict[str, Any] = {
        **describe_run(),
        "model": str(SIZE.shape),
        "prompt": str(SIZE),
        "chunk_bytes": SIZE.chunk_len * SIZE.bytes_per_token,
        "num_chunks": NUM_CHUNKS,
        "exponent": EXPONENT,
        "num_clients": NUM_CLIENTS,
        "flags": flags,
        "tiers": {**tiers, "disk": {"path": "FOLDER", "max_bytes": DISK_BYTES}},
        "budgets": {"pool": POOL_TOKENS * SIZE.bytes_per_token, "host": HOST_BYTES, "disk": DISK_BYTES},
        "interval_s": INTERVAL_S,
    }
    config = ("--chunk-cache", "--chunk-cache-config", json.dumps({"tiers": tiers}))
    log_path = CACHE_DIR / f"server-{args.name}.log"
    env = {**offline_env(), **STRICT}
    with Server(model_dir, *flags, *config, env=env, log_path=log_path) as server:
        console.print(f"started in {server.start_s:.0f} s", highlight=False)
        samples = [sample(server, 0.0)]
        traffic = Traffic(
            server, corpus, num_chunks=SIZE.num_chunks, exponent=EXPONENT, interval_s=INTERVAL_S, seed=args.seed
        )
        with traffic.running(NUM_CLIENTS):
            rest_at = REST_EVERY_S
            while (now := time.monotonic() - traffic.began) < 60 * args.minutes and server.alive():
                if now >= rest_at:
                    traffic.rest(REST_S)
                    rest_at += REST_EVERY_S
                samples.append(sample(server, time.monotonic() - traffic.began))
                console.print(progress(samples[-1], traffic), highlight=False)
                time.sleep(SAMPLE_S)
        report["end"] = settle(server, folder)
        report["end"]["bad_log_lines"] = server.bad_log_lines
    tally = traffic.tally
    report |= {
        "minutes": round(samples[-1]["at_s"] / 60, 2),
        "load_1min_end": round(os.getloadavg()[0], 2),
        "num_requests": tally.num_requests,
        "mean_s": tally.seconds / max(1, tally.num_requests),
        "num_chunks_seen": len(tally.seen),
        "reasons": dict(tally.reasons.most_common()),
        "errors": tally.errors[:20],
        "num_errors": len(tally.errors),
        "checks": [vars(check) for check in tally.checks],
        "hits": [{"at_s": number * INTERVAL_S, **tally.buckets[number]} for number in sorted(tally.buckets)],
        "samples": samples,
    }
    return report


def sample(server: Server, at_s: float) -> dict[str, Any]:
    """What the scheduler process and its tiers hold at the moment; sizes in bytes."""
    stats = tier_stats(server)
    process = psutil.Process(stats["pid"])
    found: dict[str, Any] = {
        "at_s": round(at_s, 2),
        "rss": process.memory_info().rss,
        "num_threads": process.num_threads(),
        "num_fds": process.num_fds(),
        "queued_write_bytes": stats["queued_write_bytes"],
        "held_requests": stats["held_requests"],
        "num_variants": stats["index"]["num_variants"],
        "load_1min": round(os.getloadavg()[0], 2),
    }
    for name in ("host", "disk"):
        tier = stats["tiers"][name]
        found |= {f"{name}_entries": tier["entries"], f"{name}_bytes": tier["bytes"]}
        found[f"{name}_evictions"] = tier["evictions"]
    return found


def settle(server: Server, folder: Path) -> dict[str, Any]:
    """State after all writes: the pool, the entries of the disk tier, its files; then the same after a flush."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats = tier_stats(server)
        paths = [path for path in folder.glob("*/*/*/*.kv") if path.exists()]
        is_settled = not stats["queued_write_bytes"] and len(paths) == stats["tiers"]["disk"]["entries"]
        if is_settled or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    pool = stats["tiers"]["pool"]
    end = {
        "pool_capacity": pool["capacity_tokens"],
        "pool_free": pool["free_tokens"],
        "pool_evictable": pool["evictable_tokens"],
        "pool_protected": pool["protected_tokens"],
        "held_requests": stats["held_requests"],
        "queued_write_bytes": stats["queued_write_bytes"],
        "disk_entries": stats["tiers"]["disk"]["entries"],
        "disk_files": len(paths),
        "disk_file_bytes": sum(path.stat().st_size for path in paths),
        "tiers": stats["tiers"],
        "estimates": stats["estimates"],
        "prefill": stats["prefill"],
    }
    server.flush()
    after = tier_stats(server)
    end["pool_free_after_flush"] = after["tiers"]["pool"]["free_tokens"]
    end["host_entries_after_flush"] = after["tiers"]["host"]["entries"]
    end["alive"] = server.alive()
    return end


def progress(now: dict[str, Any], traffic: Traffic) -> str:
    tally = traffic.tally
    counts = sum(tally.buckets.values(), start=type(tally.reasons)())
    worst = max((check.difference for check in tally.checks), default=0.0)
    return (
        f"{now['at_s']:6.0f} s  {tally.num_requests} requests, {len(tally.errors)} errors, {len(tally.checks)} checks "
        f"(worst {worst:.1e}); RSS {now['rss'] / 1e6:.0f} MB, {now['num_threads']} threads, {now['num_fds']} files; "
        f"host {now['host_entries']}, disk {now['disk_entries']}; {dict(counts)}"
    )


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    console = Console(stderr=True, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-tiers-"))
    try:
        report = run(args, folder, console)
    except ServerError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["summary"] = summarize(report)
    markdown = soak_markdown(report)
    json_path, markdown_path = write_result(args.out, args.name, report, markdown)
    print("\n".join(markdown))
    print(f"\nwritten: {os.path.relpath(json_path)}, {os.path.relpath(markdown_path)}")
    failed = [row["what"] for row in report["summary"]["holds"] if not row["met"]]
    for what in failed:
        console.print(f"does not hold: {what}", style="red", highlight=False)
    return 1 if failed and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
