"""Passages found in prompts that nobody marked (`--chunk-cache-discover`): how many, at what cost and memory.

    python benchmark/host/bench_discover.py FOLDER [--num N] [--repeats N] [--out FOLDER]

The folder is RAGPulse's (`benchmark/common/ragpulse.py`); texts are made from its ids, equal ids equal text. Nothing is
evicted: a passage counts as reusable by marks from its second sight on, and as found where the discoverer marks tokens
of it as a chunk that it knew before. Cost is of prompts of which nothing was ever there, beside all that was learnt.
Result: `benchmark/results/host/discover.*`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.ragpulse import read_ragpulse
from benchmark.common.results import RESULTS_DIR, Spread, describe_run, markdown_table, run_markdown, write_result
from benchmark.serving.prompt import Prompt
from benchmark.serving.traces import from_ragpulse

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.plan.discover import Discoverer
from chunk_cache_tools.jsonl import DataError

VOCAB = 100_000
PARTITION = Partition()
LENGTHS = (3_000, 16_000, 100_000)


def replay(prompts: Sequence[Prompt], discoverer: Discoverer) -> dict[str, Any]:
    """All prompts, one after the other: tokens that marks would reuse, and of these and of others what was found."""
    seen: set[str] = set()
    counts = dict.fromkeys(("tokens", "passages", "marked", "found", "found elsewhere"), 0)
    for prompt in prompts:
        ids = array("q", prompt.tokens)
        known = frozenset(discoverer.keys())
        reused = bytearray(len(ids))
        for start, end in discoverer.find(PARTITION, ids):
            if chunk_key(PARTITION, ids[start:end]) in known:
                reused[start:end] = bytes([1]) * (end - start)
        num_in_marked, at = 0, len(prompt.head)
        for chunk in prompt.chunks:
            start, at = at, at + len(chunk.content)
            counts["passages"] += at - start
            if chunk.key in seen:
                counts["marked"] += at - start
                num_in_marked += sum(reused[start:at])
        counts["found"] += num_in_marked
        counts["found elsewhere"] += sum(reused) - num_in_marked
        counts["tokens"] += len(ids)
        seen.update(chunk.key for chunk in prompt.chunks)
    return counts | discoverer.stats()


def cost(discoverer: Discoverer, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of `find` on prompts of new tokens, by their length."""
    rng, rows = random.Random(1), []
    for length in LENGTHS:
        prompts = [array("q", rng.choices(range(VOCAB), k=length)) for _ in range(repeats)]
        times = []
        for prompt in prompts:
            begin = time.perf_counter()
            found = discoverer.find(PARTITION, prompt)
            times.append(1000 * (time.perf_counter() - begin))
            assert not found, "nothing was there before"
        rows.append({"tokens": length, "ms": Spread.of(times).as_dict()})
    return rows


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    r = report["replay"]
    shares = [
        ("tokens of all prompts", r["tokens"], ""),
        ("of passages", r["passages"], ""),
        ("of passages that were there before: what marks can reuse", r["marked"], ""),
        ("of these found without marks", r["found"], f"{r['found'] / r['marked']:.1%}"),
        (
            "found in other text (history, results of a search)",
            r["found elsewhere"],
            f"{r['found elsewhere'] / r['tokens']:.1%} of all",
        ),
    ]
    lines = ["# Passages without marks", "", *run_markdown(report), *report["trace"], ""]
    lines += markdown_table(["", "tokens", "share"], shares)
    lines += [
        "",
        f"Kept at the end: {r['num_kept_tokens']:,} tokens (4 bytes each, and about as much again to find them), "
        f"{r['num_chunks']:,} chunks.",
        "",
    ]
    lines += ["Cost of a prompt of which nothing is found, beside all of that, median (min-max):", ""]
    rows = [
        (f"{row['tokens']:,}", f"{row['ms']['median']:.2f} ms ({row['ms']['min']:.2f}-{row['ms']['max']:.2f})")
        for row in report["cost"]
    ]
    return [*lines, *markdown_table(["tokens", "time"], rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of RAGPulse")
    parser.add_argument("--num", type=int, help="requests (default: all)")
    parser.add_argument("--repeats", type=int, default=30, help="prompts of each length whose cost is measured")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "host", help="folder of the result files")
    args = parser.parse_args()
    try:
        pulse = read_ragpulse(args.folder, args.num)
    except DataError as error:
        sys.exit(f"error: {error}")
    discoverer = Discoverer()
    report: dict[str, Any] = {
        **describe_run(),
        "trace": pulse.markdown(),
        "replay": replay(from_ragpulse(pulse, VOCAB), discoverer),
    }
    report["cost"] = cost(discoverer, args.repeats)
    for path in write_result(args.out, "discover", report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
