"""Time to first token by number of chunks, by their length, by requests at once and by size of the model.

    python benchmark/ttft/bench_shapes.py [--sweeps chunks length batch model] [--repeats N] [--quick] [--out FOLDER]

The counterpart of CacheBlend's figure 15, Cache-Craft's 23b to 23d, FusionRAG's 19 and A3's 6b: one number of the
prompts of `bench_ttft.py` changes, all others stay, with a smaller model but where that is what changes. Stock is
`"mode": "off"` on the same server, by turns with each method. Where several requests come at once it is the time until
all have their first token. Results: `benchmark/results/ttft/shapes-SWEEP-SWEEP.*`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import LlamaShape, cached_llama
from benchmark.common.results import Spread, describe_run, markdown_table, result_dir, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env
from benchmark.ttft.measure import METHODS, STOCK, SYSTEMS, System, prime
from benchmark.ttft.workload import FULL, QUICK, Prompt, Size, Workload

MEASURED = (STOCK, SYSTEMS[1], *(system for system in METHODS if "options" not in system.options and system != STOCK))
"""Stock, full reuse, and every method at one ratio."""
SMALL = LlamaShape(6, 512, 8, 8, 1408, 2048)


@dataclass(frozen=True)
class Point:
    """One place of a sweep."""

    sweep: str
    value: str
    size: Size
    at_once: int = 1


def points_of(base: Size, large: LlamaShape) -> list[Point]:
    """All places of all sweeps."""
    chunks = [Point("chunks", str(n), replace(base, num_chunks=n)) for n in (3, 5, 9, 13)]
    quarter = base.chunk_len // 4
    length = [Point("length", str(n), replace(base, chunk_len=n)) for n in (quarter, 2 * quarter, base.chunk_len)]
    batch = [Point("batch", str(n), replace(base, chunk_len=quarter), n) for n in (1, 2, 4)]
    model = [Point("model", str(shape), replace(base, shape=shape)) for shape in (base.shape, large)]
    return chunks + length + batch + model


def measure(point: Point, repeats: int) -> list[dict[str, Any]]:
    """One row per system, on a server of its own."""
    size = point.size
    tokens = -(-size.prompt_len * (size.num_chunks**2 + 2 * point.at_once) // 1024) * 1024
    flags = ["--chunk-cache", "--skip-tokenizer-init", "--max-total-tokens", str(tokens)]
    folder = cached_llama(size.shape)
    seconds: dict[str, list[float]] = {system.name: [] for system in MEASURED}
    order, draw = list(MEASURED), random.Random(1)
    log = CACHE_DIR / f"server-shapes-{point.sweep}.log"
    with Server(folder, *flags, env=offline_env(), log_path=log) as server, ThreadPoolExecutor(point.at_once) as pool:
        prompts: list[Prompt] = []
        for _ in range(repeats):
            draw.shuffle(order)
            for system in order:
                if len(prompts) < point.at_once:
                    prompts = _new_prompts(server, size, draw.randrange(1 << 30))
                asked = [prompts.pop() for _ in range(point.at_once)]
                begin = time.perf_counter()
                list(pool.map(partial(_ask, server, system), asked))
                seconds[system.name].append(time.perf_counter() - begin)
    stock = statistics.median(seconds[STOCK.name])
    return [
        {
            "sweep": point.sweep,
            "value": point.value,
            "prompt": str(size),
            "at_once": point.at_once,
            "system": system.name,
            "seconds": Spread.of(seconds[system.name]).as_dict(),
            "speedup": round(stock / statistics.median(seconds[system.name]), 2),
        }
        for system in MEASURED
    ]


def _new_prompts(server: Server, size: Size, seed: int) -> list[Prompt]:
    """All prompts of chunks that are the only ones stored from now on."""
    server.flush()
    work = Workload(size, seed)
    prime(server, work, lambda _: None)
    return [work.fresh() for _ in range(work.num_fresh)]


def _ask(server: Server, system: System, prompt: Prompt) -> None:
    reply = server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, **system.options}).chunk_cache
    if bool(reply["reused_tokens"]) == (system is STOCK):
        raise RuntimeError(f"{system.name}: not what was to be measured: {reply}")


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result: per sweep a table of factors against stock."""
    lines = ["# Time to first token by the shape of the requests", "", *run_markdown(report)]
    lines += [
        "Stock: median seconds (min-max). Others: how many times sooner. A column is one server, systems by turns."
    ]
    for sweep in dict.fromkeys(row["sweep"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["sweep"] == sweep]
        values = list(dict.fromkeys(row["value"] for row in rows))
        prompts = {row["value"]: row["prompt"] for row in rows}
        table = []
        for system in dict.fromkeys(row["system"] for row in rows):
            found = {row["value"]: row for row in rows if row["system"] == system}
            table.append((system, *(_cell(found[value]) for value in values)))
        lines += ["", f"## {TITLES[sweep]}", "", *markdown_table(["system", *values], table), ""]
        lines += [f"- {value}: {prompt}" for value, prompt in prompts.items()]
    return lines


TITLES = {
    "chunks": "Number of chunks",
    "length": "Length of chunks",
    "batch": "Requests at once",
    "model": "Size of the model",
}


def _cell(row: dict[str, Any]) -> str:
    spread = row["seconds"]
    if row["system"] == STOCK.name:
        return f"{spread['median']:.3f} ({spread['min']:.3f}-{spread['max']:.3f})"
    return f"{row['speedup']:.1f}x"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small model and prompts: a check, no result")
    parser.add_argument("--out", type=Path, help="folder of the result files")
    return parser.parse_args(argv)


def main() -> int:
    leave_on_sigterm()
    args = parse_args()
    report: dict[str, Any] = {**describe_run(), "rows": []}
    base, large = (QUICK, replace(QUICK.shape, layers=6)) if args.quick else (replace(FULL, shape=SMALL), FULL.shape)
    for point in points_of(base, large):
        if point.sweep in args.sweeps:
            report["rows"] += measure(point, args.repeats)
            print(f"{point.sweep} {point.value}: measured", flush=True)
    out = result_dir(args, "ttft")
    for path in write_result(out, "-".join(("shapes", *args.sweeps)), report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
