"""What a replica keeps in mind of a store that holds ten million chunks, and what a lookup of ten of them takes.

    python benchmark/index/bench_ledger.py [--chunks N] [--asked N] [--out FOLDER]

One replica's `ChunkTiers` with a remote store, whose ledger is told of every chunk: the most that it can come to know.
Of two replicas on the store none has another, so more are as many of these. Each lookup is `stored_lens` of ten chunks
at random, of which five are known. Bytes are those of the process, the allocator's losses included.

Then a real Valkey, where one is installed, with `--asked` chunks whose KV is a few bytes: what a worker takes, while a
request waits, to ask for ten chunks and compare their tokens. Results: `benchmark/results/index/ledger.*`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import numpy as np
import psutil
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.simulate.engine import key_of

from chunk_cache.index.variant import variant_name
from chunk_cache.options.config import parse_config
from chunk_cache.tiers.cost import PrefillCost
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.manager import ChunkTiers
from sglang_chunk_cache.tiers.redis_medium import RedisMedium
from sglang_chunk_cache.tiers.registry import open_tiers
from unit.tiers.medium_suite import make_stored
from unit.tiers.redis_server import RedisServer, find_binary
from unit.tiers.tier_harness import DictPool

FINGERPRINT = Fingerprint("bench", "bfloat16", num_layers=1, kv_heads=1, head_dim=1, v_head_dim=1, rotary="bench")
CHUNK_LEN = 256
NUM_ASKED = 10
NUM_LOOKUPS = 2000
NOWHERE = "redis://127.0.0.1:1/0"
"""Asked by none of the lookups."""


def open_replica() -> tuple[ChunkTiers, TierLedger]:
    """The tiers of a replica, and the ledger of its store."""
    config = parse_config({"tiers": {"remote": NOWHERE}})
    assert config.tiers is not None, "a tier was asked for"
    (remote,) = opened = open_tiers(config, FINGERPRINT)
    tiers = ChunkTiers(
        config.tiers,
        opened,
        pool=DictPool(),
        metrics=TierMetrics(enabled=False),
        fingerprint=FINGERPRINT,
        ratio=0.15,
        reduce_max=None,
        prefill_cost=PrefillCost(),
    )
    return tiers, remote.ledger


def entry_of(number: int) -> EntryId:
    return EntryId(key_of(number), variant_name(number % 4096, 0, False, b"", ()))


def fill(ledger: TierLedger, num_chunks: int) -> tuple[float, float]:
    """Bytes and microseconds of an entry."""
    gc.collect()
    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    size = FINGERPRINT.payload_len(CHUNK_LEN)
    for number in range(num_chunks):
        entry_id = entry_of(number)
        assert ledger.prepare_store(entry_id, size) == (), f"{entry_id} was refused"
        ledger.complete_store(entry_id, True)
    seconds = time.perf_counter() - began
    return (process.memory_info().rss - before) / num_chunks, 1e6 * seconds / num_chunks


def milliseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """What passes, and what the processor is busy with it: not what others run between."""
    began, cpu_began = time.perf_counter(), time.thread_time()
    call()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - cpu_began)


def spread(samples: list[tuple[float, float]]) -> dict[str, float]:
    passed, busy = np.array(samples).T
    quantiles = {"median": 50, "p99": 99}
    of_cpu = {f"{name}_cpu": float(np.percentile(busy, q)) for name, q in quantiles.items()}
    return {name: float(np.percentile(passed, q)) for name, q in quantiles.items()} | of_cpu


def collection_ms() -> float:
    """Of the processor, for a full collection of the garbage collector."""
    return min(milliseconds(gc.collect)[1] for _ in range(3))


def lookups(tiers: ChunkTiers, num_chunks: int, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of one of `NUM_ASKED` chunks, half of which are there."""

    def one() -> tuple[float, float]:
        entries = [entry_of(int(number)) for number in rng.integers(0, num_chunks, NUM_ASKED)]
        keys = [entry.key for entry in entries]
        keys[::2] = [bytes(reversed(key)) for key in keys[::2]]
        names = {key: entry.name for key, entry in zip(keys, entries, strict=True)}
        found: dict[bytes, int] = {}
        took = milliseconds(lambda: found.update(tiers.stored_lens(names)))
        assert found == dict.fromkeys(keys[1::2], CHUNK_LEN), f"{len(found)} of 5 were found"
        return took

    return spread([one() for _ in range(NUM_LOOKUPS)])


def touches(ledger: TierLedger, num_chunks: int, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of counting a use of `NUM_ASKED` chunks."""

    def one() -> tuple[float, float]:
        keys = [key_of(int(number)) for number in rng.integers(0, num_chunks, NUM_ASKED)]
        entry_ids = [entry_id for key in keys for entry_id in ledger.entries_of(key)]
        return milliseconds(lambda: [ledger.touch(entry_id) for entry_id in entry_ids])

    return spread([one() for _ in range(NUM_LOOKUPS)])


def asked(num_chunks: int, rng: np.random.Generator) -> dict[str, float] | None:
    """Milliseconds of asking a store for `NUM_ASKED` chunks, their tokens compared; None = none is installed."""
    binary = find_binary()
    if binary is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        store = RedisServer(binary, Path(folder))
        store.start()
        try:
            medium = RedisMedium(store.url, FINGERPRINT)
            written = [make_stored(FINGERPRINT, key=key_of(i), length=CHUNK_LEN, seed=i) for i in range(num_chunks)]
            for one in written:
                medium.write(one)

            def ask(numbers: list[int]) -> None:
                for number in numbers:
                    (info,) = medium.find(written[number].info.key)
                    assert info.token_ids == written[number].info.token_ids, "other tokens"

            draws = [rng.integers(0, num_chunks, NUM_ASKED).tolist() for _ in range(200)]
            return spread([milliseconds(lambda numbers=numbers: ask(numbers)) for numbers in draws])
        finally:
            store.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=10_000_000, help="of the store (default: 10000000)")
    parser.add_argument("--asked", type=int, default=5_000, help="of the Valkey that is asked (default: 5000)")
    parser.add_argument("--out", type=Path, help="folder (default: benchmark/results/index)")
    args = parser.parse_args()
    run, rng = describe_run(), np.random.default_rng(0)
    store_ms = asked(args.asked, rng)
    tiers, ledger = open_replica()
    collected_ms = collection_ms()
    num_bytes, store_us = fill(ledger, args.chunks)
    found = {
        "bytes_per_chunk": round(num_bytes),
        "gigabytes": round(num_bytes * args.chunks / 1e9, 3),
        "us_to_store": round(store_us, 1),
        "lookup_ms": lookups(tiers, args.chunks, rng),
        "touch_ms": touches(ledger, args.chunks, rng),
        "collection_ms": {"before": collected_ms, "after": collection_ms()},
        "ask_ms": store_ms,
    }
    tiers.close()
    rows = [
        [f"a lookup of {NUM_ASKED} chunks", *both(found["lookup_ms"])],
        [f"counting a use of {NUM_ASKED}", *both(found["touch_ms"])],
    ]
    if store_ms is not None:
        rows.append([f"asking a Valkey for {NUM_ASKED}, by a worker, tokens compared", *both(store_ms)])
    text = ["# The ledger of a shared store", "", *run_markdown(run), ""]
    text += [
        f"{args.chunks:,} chunks in one replica's ledger take {found['gigabytes']:g} GB, **{found['bytes_per_chunk']}",
        f"bytes each**, and {found['us_to_store']:g} microseconds to enter. A full garbage collection takes",
        f"{collected_ms:.0f} ms of the processor without them, {found['collection_ms']['after']:.0f} with them.",
        f"The Valkey has {args.asked:,} chunks. Milliseconds, and those of the processor, without what others run:",
        "",
    ]
    text += markdown_table(["", "median", "p99", "median, processor", "p99, processor"], rows)
    print("\n".join(text))
    for path in write_result(
        args.out or RESULTS_DIR / "index", "ledger", {**run, "chunks": args.chunks, **found}, text
    ):
        print(f"written: {path}")


def both(values: dict[str, float]) -> list[str]:
    return [f"{values[name]:.3f}" for name in ("median", "p99", "median_cpu", "p99_cpu")]


if __name__ == "__main__":
    main()
