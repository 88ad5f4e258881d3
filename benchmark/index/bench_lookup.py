"""What planning one prompt costs when the index is full: keys, lookups and plan of a prompt of marked chunks.

    python benchmark/index/bench_lookup.py [--out result.json]

The index holds chunks of random tokens, half in exact paths, half in nodes of their own, some with several variants.
Each measured prompt picks chunks at random, so that caches are as cold as in service. The store is a dict, so the time
of the radix tree's own match is not in it. The cyclic garbage collector stays on, as in a server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chunk_cache.index import ChunkIndex, Lookup
from chunk_cache.keys import Partition, chunk_key, chunk_keys
from chunk_cache.methods import METHODS
from chunk_cache.plan import make_plan
from chunk_cache.request import RequestOptions
from chunk_cache.variant import NodeHome, PathHome, PathTokens, Variant

PARTITION = Partition()
PREFIX_LEN = 64
QUESTION_LEN = 96
VOCABULARY = 128_000


@dataclass
class Filled:
    """An index, the tokens of its chunks, and a store in which everything is there."""

    index: ChunkIndex
    chunks: list[array[int]]
    stored_len: dict[int, int]  # variant id -> leading tokens stored

    def resolve(self, variant: Variant) -> int:
        return self.stored_len[variant.variant_id]


def fill(num_chunks: int, chunk_len: int, chunks_per_path: int, max_variants_per_chunk: int, seed: int) -> Filled:
    """Remember `num_chunks` chunks, every fourth in a second context too."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, size=(num_chunks, chunk_len), dtype=np.int64)
    chunks = [array("q", row.tobytes()) for row in tokens]
    path_tokens = num_chunks * chunk_len + num_chunks * PREFIX_LEN
    filled = Filled(ChunkIndex(2 * num_chunks, max_variants_per_chunk, 2 * path_tokens), chunks, {})
    keys = [chunk_key(PARTITION, chunk) for chunk in chunks]
    for first in range(0, num_chunks, chunks_per_path):
        members = range(first, min(first + chunks_per_path, num_chunks))
        if (first // chunks_per_path) % 2:
            for i in members:
                add(filled, keys[i], chunks[i], PREFIX_LEN, 1, (), NodeHome(chunks[i], "chunk"))
            continue
        text = array("q", bytes(8 * PREFIX_LEN))
        for i in members:
            text.extend(chunks[i])
        path = PathTokens(text, PARTITION)
        for place, i in enumerate(members):
            start = PREFIX_LEN + place * chunk_len
            add(filled, keys[i], chunks[i], start, 0, tuple(keys[first:i]), PathHome(path, start))
    for i in range(0, num_chunks, 4):
        other = keys[(i + num_chunks // 2) % num_chunks]
        add(filled, keys[i], chunks[i], PREFIX_LEN + chunk_len, 1, (other,), NodeHome(chunks[i], "second"))
    return filled


def add(
    filled: Filled,
    key: bytes,
    chunk: array[int],
    start: int,
    generation: int,
    context: tuple[bytes, ...],
    home: PathHome | NodeHome,
) -> None:
    variant = filled.index.add(key, length=len(chunk), start=start, generation=generation, context=context, home=home)
    assert variant is not None, f"the index refused a chunk at {start}"
    filled.stored_len[variant.variant_id] = len(chunk)


def measure(
    filled: Filled, method: str, num_marked: int, num_prompts: int, page_size: int, seed: int
) -> dict[str, list[float]]:
    """Microseconds per prompt: of each step, of all, and the processor time of all (not what others ran between)."""
    draw = random.Random(seed)
    chunk_len = len(filled.chunks[0])
    spans = tuple((PREFIX_LEN + i * chunk_len, PREFIX_LEN + (i + 1) * chunk_len) for i in range(num_marked))
    opts = RequestOptions(spans=spans, method=method)
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
        lookups: list[Lookup | None] = [filled.index.lookup(key, filled.resolve, max_generation=8) for key in keys]
        times.append(time.perf_counter())
        plan = make_plan(
            opts=opts,
            default_method="epic",
            default_ratio=0.15,
            prompt_len=len(prompt),
            prefix_len=PREFIX_LEN,
            max_prefix_len=len(prompt) - 1,
            page_size=page_size,
            lookups=lookups,
            min_reuse_len=1,
            chunk_keys=keys,
        )
        times.append(time.perf_counter())
        for lookup in lookups:
            if lookup is not None and lookup.variant is not None:
                filled.index.touch(lookup.variant)
        times.append(time.perf_counter())
        cpu = 1e6 * (time.thread_time() - cpu_began)
        assert plan.num_reused >= num_marked * chunk_len - page_size, f"everything is stored, but:\n{plan}"
        steps = [1e6 * (b - a) for a, b in itertools.pairwise(times)]
        for name, value in zip(samples, [*steps, sum(steps), cpu], strict=True):
            samples[name].append(value)
    return samples


def cpu_model() -> str:
    """The processor's name where the system tells it."""
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
    parser.add_argument("--chunks", type=int, default=100_000, help="chunks in the index")
    parser.add_argument("--chunk-len", type=int, default=400, help="tokens per chunk")
    parser.add_argument("--marked", type=int, default=10, help="chunks per prompt")
    parser.add_argument("--prompts", type=int, default=3000, help="prompts measured per method")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()

    began = time.perf_counter()
    filled = fill(args.chunks, args.chunk_len, args.marked, max_variants_per_chunk=4, seed=args.seed)
    fill_s = time.perf_counter() - began
    index = filled.index
    machine = {"cpu": cpu_model(), "python": platform.python_version(), "numpy": np.__version__}
    size = {"chunks": index.num_chunks, "variants": len(index), "paths": index.num_paths}
    print(f"{machine['cpu']}, Python {machine['python']}, numpy {machine['numpy']}, one thread")
    print(f"{size['chunks']} chunks, {size['variants']} variants, {size['paths']} paths; filled in {fill_s:.1f} s")
    print(
        f"prompt: {PREFIX_LEN} exact tokens + {args.marked} x {args.chunk_len} + {QUESTION_LEN}; {args.prompts} prompts"
    )
    rows = {}
    for method in METHODS:
        measure(filled, method, args.marked, 50, args.page_size, args.seed + 1)  # imports, caches
        samples = measure(filled, method, args.marked, args.prompts, args.page_size, args.seed)
        rows[method] = {
            step: {"median_us": float(np.median(values)), "p99_us": float(np.percentile(values, 99))}
            for step, values in samples.items()
        }
    table(rows, print)
    if args.out:
        result = {"command": " ".join(["python", *sys.argv]), "machine": machine, "index": size, "methods": rows}
        result["prompt"] = {"chunks": args.marked, "chunk_len": args.chunk_len, "num_prompts": args.prompts}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
