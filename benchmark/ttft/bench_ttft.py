"""Time to first token with reused chunks against stock SGLang, what plain requests lose, and KV slots per request.

    python benchmark/ttft/bench_ttft.py [--quick] [--parts ttft,methods,statistics,plain,memory] [--out FOLDER]

One server with `--chunk-cache` answers all requests; stock is `"mode": "off"` on it, with SGLang's prefix cache on.
Chunks are primed one by one behind the system prompt, and nothing else is warmed up. Every measured prompt has a new
order of the chunks and a new question. Plain requests are compared with a second server, without `--chunk-cache`; KV
slots are also counted on a third, with a page size of 16. Results: `benchmark/results/ttft/`, `.cache/bench/` with
`--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import cached_llama
from benchmark.common.results import describe_run, result_dir, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.ttft.measure import (
    METHODS,
    NUM_EXPLAINED,
    PLAIN_REQUESTS,
    SYSTEMS,
    Tick,
    count_slots,
    time_plain,
    time_reuse,
    time_selection,
    time_statistics,
)
from benchmark.ttft.report import missed_targets, to_markdown
from benchmark.ttft.workload import FULL, QUICK, Size, Workload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NUM_SPARE = 3
PARTS = ("ttft", "methods", "statistics", "plain", "memory")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small model and prompts, few repeats: a check, no result")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--repeats", type=int, help="measurements per system (default: 7, quick 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in the place of the generated one")
    parser.add_argument("--out", type=Path, help="folder of the result files")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    args = parser.parse_args()
    args.parts = tuple(args.parts.split(","))
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
    args.repeats = args.repeats or default_repeats(args.quick)
    args.plain_repeats = 5 if args.quick else 25
    args.out = result_dir(args, "ttft")
    return args


def default_repeats(quick: bool) -> int:
    return 3 if quick else 7


def most_repeats(work: Workload) -> int:
    """Most repeats for which the workload has prompts in every part."""
    return min((work.num_fresh - 2) // len(SYSTEMS), (work.num_fresh - NUM_EXPLAINED * len(METHODS)) // len(METHODS))


def run(args: argparse.Namespace, size: Size, console: Console) -> dict[str, Any]:
    """Runs the parts of `--parts`; returns the report."""
    work = Workload(size, args.seed, num_spare=NUM_SPARE)
    if args.repeats > most_repeats(work):
        raise SystemExit(f"--repeats: at most {most_repeats(work)} with {size.num_chunks} chunks")
    report: dict[str, Any] = {
        **describe_run(),
        "model": args.model.name if args.model else str(size.shape),
        "prompt": str(size),
        "repeats": args.repeats,
        "flags": flags(args, size),
    }
    model_dir = args.model or cached_llama(size.shape)
    with ticking(args, size, console) as tick:
        with Server(model_dir, "--chunk-cache", *flags(args, size), **server_options("chunk-cache")) as server:
            tick(f"server started in {server.start_s:.0f} s")
            if "ttft" in args.parts:
                report["ttft"] = time_reuse(server, work, SYSTEMS, args.repeats, tick)
            if "methods" in args.parts:
                server.flush()
                again = Workload(size, args.seed + 1, num_spare=NUM_SPARE)
                report["methods"] = time_reuse(server, again, METHODS, args.repeats, tick)
                report["selection"] = time_selection(server, again, METHODS[1:], tick)
            if "statistics" in args.parts:
                server.flush()
                report["statistics"] = time_statistics(server, Workload(size, args.seed + 2), args.repeats, tick)
            if "memory" in args.parts:
                report["memory"] = [count_slots(server, work, 1, tick)]
            if "plain" in args.parts:
                server.flush()
                with Server(model_dir, *flags(args, size), **server_options("stock")) as stock:
                    tick(f"server started in {stock.start_s:.0f} s")
                    report["plain"] = time_plain(server, stock, work, args.plain_repeats, tick)
        if "memory" in args.parts:
            paged = ("--chunk-cache", "--page-size", "16", *flags(args, size))
            with Server(model_dir, *paged, **server_options("page16")) as server:
                tick(f"server started in {server.start_s:.0f} s")
                report["memory"].append(count_slots(server, work, 16, tick))
    return report


def flags(args: argparse.Namespace, size: Size) -> list[str]:
    """Flags of all servers. The pool holds all that a run leaves in the exact cache, so nothing is evicted."""
    tokens = size.prompt_len * (args.repeats + 4)
    tokens = max(tokens, 2 * args.plain_repeats * max(kind.prompt_len for kind in PLAIN_REQUESTS))
    return ["--skip-tokenizer-init", "--max-total-tokens", str(-(-tokens // 1024) * 1024)]


def server_options(name: str) -> dict[str, Any]:
    return {"env": offline_env(), "log_path": CACHE_DIR / f"server-{name}.log"}


@contextlib.contextmanager
def ticking(args: argparse.Namespace, size: Size, console: Console) -> Iterator[Tick]:
    """A live bar with one step per measurement."""
    steps = 1
    if "ttft" in args.parts:
        steps += size.num_chunks + NUM_SPARE + args.repeats * len(SYSTEMS)
    if "methods" in args.parts:
        steps += size.num_chunks + NUM_SPARE + args.repeats * len(METHODS) + NUM_EXPLAINED * (len(METHODS) - 1)
    if "statistics" in args.parts:
        steps += args.repeats + 1
    if "plain" in args.parts:
        steps += 1 + len(PLAIN_REQUESTS) * (args.plain_repeats + 1)
    if "memory" in args.parts:
        steps += 3
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting a server", total=steps)
        yield lambda what: progress.update(task, advance=1, description=what)


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    console = Console()
    size = QUICK if args.quick else FULL
    console.print(f"{size.shape}\n{size}", highlight=False, soft_wrap=True)
    try:
        report = run(args, size, console)
    except ServerError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    markdown = to_markdown(report)
    json_path, markdown_path = write_result(args.out, "ttft", report, markdown)
    print("\n".join(markdown))
    print(f"\nwritten: {os.path.relpath(json_path)}, {os.path.relpath(markdown_path)}")
    missed = missed_targets(report)
    for line in missed:
        console.print(f"target missed: {line}", style="red", highlight=False)
    return 1 if missed and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
