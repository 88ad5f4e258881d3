"""Measures the time to plan one prompt when the index is full, and the memory of a variant.

    python benchmark/index/bench_lookup.py [--out result.json]

The index holds chunks of random tokens, each with variants in random contexts, half of them in exact paths and half in
their own nodes. With `--share` they all belong to one partition, and fill its share of the index. Measured are keys,
lookups (all variants are compared with the new context), plan and touch. Each prompt has random chunks, so that caches
are as cold as on a server. The store is a dict, so the radix tree's own match is not measured. The cyclic garbage
collector stays on, as on a server. Memory is measured on a smaller index.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.lookup import Lookup
from chunk_cache.index.need import Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.index.variant import NodeHome, PathHome, PathTokens, Variant
from chunk_cache.keys import Partition, chunk_key, chunk_keys
from chunk_cache.methods import METHODS, Ranking
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import PlanSettings, make_plan

Rankings: TypeAlias = "np.ndarray[tuple[int, int, int], np.dtype[np.float32]]"
PARTITION = Partition()
PREFIX_LEN = 64
QUESTION_LEN = 96
VOCABULARY = 128_000
NUM_CHUNKS, NUM_VARIANTS = 100_000, 5  # chunks in the index, variants of each
NUM_MARKED = 10  # chunks of a prompt


@dataclass
class Filled:
    """An index, the tokens of its chunks, and a store that has evicted nothing."""

    index: ChunkIndex
    chunks: list[array[int]]
    stored_len: dict[int, int]  # variant id -> leading tokens stored

    def resolve(self, variant: Variant) -> int:
        return self.stored_len[variant.variant_id]


def fill(num_chunks: int, chunk_len: int, num_variants: int, seed: int, share: float = 1.0) -> Filled:
    """Makes an index of `num_chunks` chunks, each in `num_variants` prompts of `NUM_MARKED` random chunks.

    Args:
        share: share of the index that the chunks fill, and that their partition may have; 1 = no quota.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, size=(num_chunks, chunk_len), dtype=np.int64)
    chunks = [array("q", row.tobytes()) for row in tokens]
    path_tokens = num_variants * num_chunks * (chunk_len + PREFIX_LEN)
    index = ChunkIndex(
        math.ceil(num_variants * num_chunks / share),
        num_variants,
        math.ceil(path_tokens / share),
        partition_share=share,
    )
    filled = Filled(index, chunks, {})
    keys = [chunk_key(PARTITION, chunk) for chunk in chunks]
    rankings = rng.random((64, 2, chunk_len), dtype=np.float32)
    for _ in range(num_variants):
        order = rng.permutation(num_chunks)
        for first in range(0, num_chunks, NUM_MARKED):
            fill_prompt(filled, [int(i) for i in order[first : first + NUM_MARKED]], keys, rankings, rng)
    return filled


def fill_prompt(
    filled: Filled, members: list[int], keys: list[bytes], rankings: Rankings, rng: np.random.Generator
) -> None:
    """Adds the chunks of one prompt: in the path of an exact prompt, or in nodes of a fused one."""
    text = array("q", bytes(8 * PREFIX_LEN))
    for i in members:
        text.extend(filled.chunks[i])
    path = PathTokens(text, PARTITION) if rng.random() < 0.5 else None
    start, prompt_keys = PREFIX_LEN, tuple(keys[i] for i in members)
    for place, i in enumerate(members):
        chunk = filled.chunks[i]
        outside, received = rankings[int(rng.integers(len(rankings)))]
        inter = rng.exponential(size=place).astype(np.float32)
        variant = filled.index.add(
            keys[i],
            length=len(chunk),
            start=start,
            generation=0 if path else 1,
            context=prompt_keys[:place],
            prompt_keys=prompt_keys,
            home=PathHome(path, start) if path else NodeHome(chunk, "chunk"),
            statistics=ChunkStatistics(outside, received, inter, 0.5 + 0.5 * float(rng.random())),
        )
        if variant is not None:
            filled.stored_len[variant.variant_id] = variant.length
        start += len(chunk)


def bytes_per_variant(chunk_len: int, share: float) -> float:
    """Bytes that the index allocates for a variant, without its ranking and the tokens of chunks and paths."""
    num_chunks = 2000
    fill(10, chunk_len, 1, 0, share)  # so that imports at first use do not count
    tracemalloc.start()
    filled = fill(num_chunks, chunk_len, NUM_VARIANTS, 0, share)
    stored = len(filled.index)
    total = tracemalloc.get_traced_memory()[0]
    paths = {v.holder for v in filled.index if isinstance(v.holder, PathTokens)}
    tokens = sum(sys.getsizeof(path.tokens) for path in paths) + sum(map(sys.getsizeof, filled.chunks))
    tracemalloc.stop()
    # The ranking of each variant: its values and the head of its array.
    rankings = stored * (2 * 4 * chunk_len + sys.getsizeof(np.empty(0)))
    store = sys.getsizeof(filled.stored_len)  # the dict that stands in for the tree
    return (total - tokens - rankings - store) / stored


def measure(
    filled: Filled, method: str, num_marked: int, num_prompts: int, page_size: int, seed: int
) -> dict[str, list[float]]:
    """Microseconds per prompt: of each step, of all steps, and the thread's CPU time of all steps."""
    draw = random.Random(seed)
    chunk_len = len(filled.chunks[0])
    spans = tuple((PREFIX_LEN + i * chunk_len, PREFIX_LEN + (i + 1) * chunk_len) for i in range(num_marked))
    opts = RequestOptions(spans=spans, method=method)
    settings = PlanSettings(default_method="epic", default_ratio=0.15, page_size=page_size, alpha=1.0)
    samples: dict[str, list[float]] = {"keys": [], "lookups": [], "plan": [], "touch": [], "all": [], "all, cpu": []}
    for _ in range(num_prompts):
        prompt = array("q", bytes(8 * PREFIX_LEN))
        for i in draw.sample(range(len(filled.chunks)), num_marked):
            prompt.extend(filled.chunks[i])
        prompt.extend(range(QUESTION_LEN))
        cpu_began = time.thread_time()
        times = [time.perf_counter()]
        keys = chunk_keys(PARTITION, prompt, spans)
        times.append(time.perf_counter())
        lookups: list[Lookup | None] = [
            filled.index.lookup(key, filled.resolve, Need(8, tuple(keys[:i]))) for i, key in enumerate(keys)
        ]
        times.append(time.perf_counter())
        plan = make_plan(
            opts,
            settings,
            prompt_len=len(prompt),
            prefix_len=PREFIX_LEN,
            max_prefix_len=len(prompt) - 1,
            lookups=lookups,
            chunk_keys=keys,
            rankings=rankings_of(method, lookups),
        )
        times.append(time.perf_counter())
        for lookup in lookups:
            if lookup is not None and lookup.variant is not None and lookup.unit_cfo is not None:
                filled.index.touch(lookup.variant, use_weight(lookup.unit_cfo, lookup.variant.length))
        times.append(time.perf_counter())
        cpu = 1e6 * (time.thread_time() - cpu_began)
        assert plan.num_reused >= num_marked * chunk_len - page_size, f"everything is stored, but:\n{plan}"
        steps = [1e6 * (b - a) for a, b in itertools.pairwise(times)]
        for name, value in zip(samples, [*steps, sum(steps), cpu], strict=True):
            samples[name].append(value)
    return samples


def rankings_of(method: str, lookups: list[Lookup | None]) -> list[Ranking | None] | None:
    """The rankings that the server gives to `make_plan`."""
    statistic = METHODS[method].statistic
    if statistic is None:
        return None
    variants = [None if lookup is None else lookup.variant for lookup in lookups]
    return [None if v is None or v.statistics is None else v.statistics.of(statistic) for v in variants]


def cpu_model() -> str:
    """The processor's name, or its architecture where the system tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table(rows: dict[str, dict[str, dict[str, float]]], show: Callable[[str], None]) -> None:
    show(f"{'method':<12} {'step':<8} {'median us':>10} {'p99 us':>10}")
    for method, steps in rows.items():
        for step, values in steps.items():
            show(f"{method:<12} {step:<8} {values['median_us']:>10.1f} {values['p99_us']:>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk-len", type=int, default=400, help="tokens per chunk")
    parser.add_argument("--prompts", type=int, default=1000, help="prompts measured per method")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--share", type=float, default=1.0, help="partition_share (default: 1, no quota)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()

    began = time.perf_counter()
    memory = bytes_per_variant(args.chunk_len, args.share)
    filled = fill(NUM_CHUNKS, args.chunk_len, NUM_VARIANTS, args.seed, args.share)
    fill_s = time.perf_counter() - began
    index = filled.index
    machine = {"cpu": cpu_model(), "python": platform.python_version(), "numpy": np.__version__}
    size = {"chunks": index.num_chunks, "variants": len(index), "paths": index.num_paths}
    print(f"{machine['cpu']}, Python {machine['python']}, numpy {machine['numpy']}, one thread")
    print(f"{size['chunks']} chunks, {size['variants']} variants, {size['paths']} paths; filled in {fill_s:.1f} s")
    print(
        f"prompt: {PREFIX_LEN} exact tokens + {NUM_MARKED} x {args.chunk_len} + {QUESTION_LEN}; {args.prompts} prompts"
    )
    ranking = 2 * 4 * args.chunk_len
    print(f"memory: {memory:.0f} bytes per variant, and {ranking} of ranking ({ranking // args.chunk_len} per token)")
    rows = {}
    for method in METHODS:
        measure(filled, method, NUM_MARKED, 50, args.page_size, args.seed + 1)  # imports, caches
        samples = measure(filled, method, NUM_MARKED, args.prompts, args.page_size, args.seed)
        rows[method] = {
            step: {"median_us": float(np.median(values)), "p99_us": float(np.percentile(values, 99))}
            for step, values in samples.items()
        }
    table(rows, print)
    if args.out:
        result = {"command": " ".join(["python", *sys.argv]), "machine": machine, "index": size, "methods": rows}
        result["bytes_per_variant"] = {"metadata": round(memory), "ranking": ranking}
        result["prompt"] = {"chunks": NUM_MARKED, "chunk_len": args.chunk_len, "num_prompts": args.prompts}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
