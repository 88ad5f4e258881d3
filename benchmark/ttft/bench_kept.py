"""Time to first token and time per token where only the best chunk tokens are kept (`keep_tokens`).

    python benchmark/ttft/bench_kept.py [--kept 512 1024] [--at-once 1 4] [--repeats N] [--quick] [--out FOLDER]

The counterpart of A3's figures 5 and 6b: the prompts of `bench_ttft.py`, answered by stock (`"mode": "off"`), by `a3`
with all tokens kept, and by `a3` with fewer, by turns on one server. Results: `benchmark/results/ttft/kept.*`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import cached_llama
from benchmark.common.results import Spread, describe_run, markdown_table, result_dir, run_markdown, write_result
from benchmark.common.server import Server, ServerError, Timed, leave_on_sigterm, offline_env
from benchmark.ttft.measure import STOCK, System, prime
from benchmark.ttft.workload import FULL, QUICK, Prompt, Size, Workload

METHOD = {"method": "a3", "ratio": 0.15}


def measure(size: Size, systems: Sequence[System], at_once: int, answer: int, repeats: int) -> list[dict[str, Any]]:
    """One row per system; so many requests begin together, each with an answer of so many tokens."""
    tokens = (size.prompt_len + answer) * 2 * at_once + size.num_chunks * size.prefix_len
    flags = ["--chunk-cache", "--skip-tokenizer-init", "--max-total-tokens", str(-(-tokens // 1024) * 1024)]
    folder = cached_llama(size.shape)
    first_s: dict[str, list[float]] = {system.name: [] for system in systems}
    token_s: dict[str, list[float]] = {system.name: [] for system in systems}
    order, draw = list(systems), random.Random(1)
    log = CACHE_DIR / f"server-kept-{at_once}.log"
    with Server(folder, *flags, env=offline_env(), log_path=log) as server, ThreadPoolExecutor(at_once) as pool:
        for _ in range(repeats):
            draw.shuffle(order)
            for system in order:
                server.flush()
                work = Workload(size, draw.randrange(1 << 30))
                prime(server, work, lambda _: None)

                def ask(prompt: Prompt, system: System = system) -> Timed:
                    options = {"spans": prompt.spans, **system.options}
                    return server.stream(prompt.ids, max_new_tokens=answer, chunk_cache=options)

                replies = list(pool.map(ask, [work.fresh() for _ in range(at_once)]))
                kept = system.options.get("keep_tokens")
                for reply in replies:
                    if kept and reply.chunk_cache.get("kept_tokens") != kept:
                        raise RuntimeError(f"{system.name}: not what was to be measured: {reply.chunk_cache}")
                first_s[system.name].append(max(reply.first_s for reply in replies))
                token_s[system.name].append(
                    statistics.median((reply.total_s - reply.first_s) / (answer - 1) for reply in replies)
                )
    stock_first, stock_token = (statistics.median(times[STOCK.name]) for times in (first_s, token_s))
    return [
        {
            "at_once": at_once,
            "system": system.name,
            "first_s": Spread.of(first_s[system.name]).as_dict(),
            "token_s": Spread.of(token_s[system.name]).as_dict(),
            "first_speedup": round(stock_first / statistics.median(first_s[system.name]), 2),
            "token_speedup": round(stock_token / statistics.median(token_s[system.name]), 2),
        }
        for system in systems
    ]


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    lines = ["# Decoding over a part of the prompt", "", *run_markdown(report), report["prompt"], ""]
    lines += [
        "Median (min-max). Of several requests at once: until the last has its first token; time per token of one."
    ]
    rows = [
        (
            row["at_once"],
            row["system"],
            Spread(**row["first_s"]).text(3),
            f"{row['first_speedup']:.1f}x",
            Spread(**row["token_s"]).text(4),
            f"{row['token_speedup']:.2f}x",
        )
        for row in report["rows"]
    ]
    head = ["at once", "system", "first token, s", "against stock", "per token, s", "against stock"]
    return [*lines, "", *markdown_table(head, rows)]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kept", nargs="+", type=int, metavar="C", help="tokens kept (default: 512 1024, quick 256)")
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1, 4], metavar="N", help="requests that begin together"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small model and prompts: a check, no result")
    parser.add_argument("--out", type=Path, help="folder of the result files")
    return parser.parse_args(argv)


def main() -> int:
    leave_on_sigterm()
    args = parse_args()
    size, answer, kept = (QUICK, 9, [256]) if args.quick else (FULL, 65, [512, 1024])
    systems = [STOCK, System("a3, all kept", METHOD)]
    systems += [System(f"a3, {num} kept", {**METHOD, "keep_tokens": num}) for num in args.kept or kept]
    report: dict[str, Any] = {**describe_run(), "prompt": f"{size}; answers of {answer} tokens.", "rows": []}
    for at_once in args.at_once:
        report["rows"] += measure(size, systems, at_once, answer, args.repeats)
        print(f"{at_once} at once: measured", flush=True)
    out = result_dir(args, "ttft")
    for path in write_result(out, "kept", report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
