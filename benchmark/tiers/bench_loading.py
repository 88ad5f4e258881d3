"""Time to first token of requests whose chunks lie in a slow tier, by loading mode, and what other requests lose.

    python benchmark/tiers/bench_loading.py [--quick] [--repeats N] [--out FOLDER]

One server per loading mode, all over one folder behind a throttle; one is measured at a time, the others are paused.
The length of a load is varied by the number of a prompt's eight chunks that lie on disk only; the others are in the
pool.
Results: `benchmark/results/tiers/`, or `.cache/bench/` with `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import LlamaShape, cached_llama
from benchmark.common.results import describe_run, result_dir, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.tiers import loading
from benchmark.tiers.loading import LOADED, MODES, QUEUED, Bench, Tick
from benchmark.tiers.prompts import Corpus, Size
from benchmark.tiers.report import idle_rows, loading_markdown, other_row, queued_row
from rich.console import Console

FULL = Size(LlamaShape(12, 768, 12, 12, 2048, 2048), system_len=64, chunk_len=512, num_chunks=8, question_len=32)
QUICK = Size(LlamaShape(4, 256, 4, 4, 704, 2048), system_len=64, chunk_len=64, num_chunks=8, question_len=32)
WAITS = (0.5, 1.5, 3.0)  # time in the queue, divided by the time of loading


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small model and prompts, few repeats: a check, no result")
    parser.add_argument("--repeats", type=int, help="measurements of each kind (default: 4, quick 2)")
    parser.add_argument("--load-s", type=float, default=6.0, help="seconds that loading all chunks of a prompt takes")
    parser.add_argument("--wait-for-load", type=float, help="begin once the load average is below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the result files")
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.quick else 4)
    args.out = result_dir(args, "tiers")
    return args


def run(args: argparse.Namespace, size: Size, folder: Path, tick: Tick) -> dict[str, Any]:
    """Runs all measurements; returns the report."""
    model_dir = cached_llama(size.shape)
    corpus = Corpus(size, max(sum(LOADED), size.num_chunks + QUEUED * len(WAITS)), args.seed)
    report: dict[str, Any] = {
        **describe_run(),
        "model": str(size.shape),
        "prompt": str(size),
        "num_bytes": size.num_bytes,
        "bytes_per_s": size.num_bytes / args.load_s,
        "repeats": args.repeats,
        "flags": flags(size),
        **{part: [] for part in ("idle", "queued", "others", "learnt")},
    }
    with contextlib.ExitStack() as stack:
        servers = {mode: make_server(model_dir, size, folder, mode, report["bytes_per_s"]) for mode in MODES}
        for server in servers.values():
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.start, servers.values()))
        for mode, server in servers.items():
            tick(f"{mode}: started in {server.start_s:.0f} s")
            server.pause()
        if args.wait_for_load:
            wait_for_load(args.wait_for_load, tick)
        report |= describe_run()
        began = time.monotonic()
        for mode, server in servers.items():
            server.resume()
            bench = Bench(server, corpus, tick)
            if not report["learnt"]:
                loading.prime(server, corpus, tick)
            measure(report, bench, mode, args.load_s)
            server.pause()
            (args.out / "loading.partial.json").write_text(json.dumps(report))
    (args.out / "loading.partial.json").unlink()
    report["minutes"] = round((time.monotonic() - began) / 60, 1)
    report["load_1min_end"] = round(os.getloadavg()[0], 2)
    return report


def wait_for_load(most: float, tick: Tick) -> None:
    """Waits until the load average of the last minute is below `most`."""
    while (load := os.getloadavg()[0]) > most:
        tick(f"waiting: load average {load:.1f}")
        time.sleep(10)


def measure(report: dict[str, Any], bench: Bench, mode: str, all_s: float) -> None:
    """Measures one server and adds to the report; `all_s`: seconds that loading all chunks of a prompt takes."""
    repeats, num_chunks = report["repeats"], bench.corpus.size.num_chunks
    loading.learn(bench)
    seconds = loading.time_idle(bench, repeats, 2 if mode == "prefetch" else 0)
    report["idle"] += idle_rows(mode, all_s / num_chunks, seconds)
    load_s = QUEUED * all_s / num_chunks
    is_sync = mode == "sync"
    waits = WAITS[1:2] if is_sync else WAITS
    queued = loading.time_queued(bench, [wait * load_s for wait in waits], repeats)
    report["queued"] += [queued_row(mode, wait_s, load_s, places) for wait_s, places in queued.items()]
    pairs = loading.time_others(bench, all_s, 2 if is_sync else repeats, is_held=not is_sync)
    report["others"].append(other_row(mode, all_s, pairs))
    report["learnt"].append({"mode": mode, **learnt(bench.server)})


def learnt(server: Server) -> dict[str, Any]:
    """The server's own estimates at the end."""
    stats = loading.tier_stats(server)
    return {"prefill": stats["prefill"], "bytes_per_s": stats["tiers"]["disk"]["bytes_per_s"]}


def flags(size: Size) -> list[str]:
    """Flags of all servers except the tiers; the pool holds the chunks and prompts of one round."""
    tokens = -(-(9 * size.prompt_len) // 1024) * 1024
    return ["--skip-tokenizer-init", "--max-total-tokens", str(tokens), "--max-running-requests", "1"]


def make_server(model_dir: Path, size: Size, folder: Path, mode: str, bytes_per_s: float) -> Server:
    """A server over the folder, not yet started."""
    tiers: dict[str, Any] = {
        "disk": {"path": str(folder)},
        "loading": mode,
        "controller": False,
        "max_variants_per_chunk": 1,
        "timeout_s": 120,
        "throttle": {"disk": {"bytes_per_s": bytes_per_s}},
    }
    config = ("--chunk-cache", "--chunk-cache-config", json.dumps({"tiers": tiers}))
    log = CACHE_DIR / f"server-tiers-{mode}.log"
    return Server(model_dir, *flags(size), *config, env=offline_env(), log_path=log)


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    console = Console(stderr=True)
    size = QUICK if args.quick else FULL
    console.print(f"{size.shape}\n{size}", highlight=False, soft_wrap=True)
    began = time.monotonic()

    def tick(what: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {what}", highlight=False)

    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-tiers-"))
    try:
        report = run(args, size, folder, tick)
    except ServerError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    markdown = loading_markdown(report)
    json_path, markdown_path = write_result(args.out, "loading", report, markdown)
    print("\n".join(markdown))
    print(f"\nwritten: {os.path.relpath(json_path)}, {os.path.relpath(markdown_path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
