"""Throughput of every medium that is there, one machine: host memory, disk, a Valkey and a Mooncake store.

    python benchmark/tiers/bench_media.py [--disk FOLDER] [--redis URL] [--mooncake URL] [--repeats N] [--out FOLDER]

Variants of Llama-3.1-8B's shape in bf16 are written and read back, by turns, each verified by its checksums, from one
thread. Stores that are not named are started, where they are installed. Results: `benchmark/results/tiers/media.*`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import torch
from benchmark.common.results import RESULTS_DIR, Spread, describe_run, markdown_table, run_markdown, write_result

from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.host import HostMedium
from sglang_chunk_cache.tiers.medium import Medium
from sglang_chunk_cache.tiers.mooncake import MooncakeMedium
from sglang_chunk_cache.tiers.redis_medium import RedisMedium
from unit.tiers.medium_suite import make_stored
from unit.tiers.mooncake_master import MooncakeMaster, is_there
from unit.tiers.redis_server import RedisServer, find_binary

FINGERPRINT = Fingerprint("bench", "bfloat16", num_layers=32, kv_heads=8, head_dim=128, v_head_dim=128, rotary="bench")
LENGTHS = (64, 512)


@contextlib.contextmanager
def media(args: argparse.Namespace) -> Iterator[dict[str, Medium]]:
    """Name -> medium of everything that is named or can be started here."""
    with contextlib.ExitStack() as stack:
        folder = args.disk or stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd()))
        opened: dict[str, Medium] = {"host": HostMedium(FINGERPRINT), "disk": DiskMedium(str(folder), FINGERPRINT)}
        redis_url, mooncake_url = args.redis, args.mooncake
        if redis_url is None and (binary := find_binary()):
            store = RedisServer(binary, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            store.start()
            stack.callback(store.kill)
            redis_url = store.url
        if redis_url is not None:
            opened["valkey"] = RedisMedium(redis_url, FINGERPRINT)
        if mooncake_url is None and is_there():
            master = MooncakeMaster()
            master.start()
            stack.callback(master.kill)
            stack.callback(master.lend("2 GB").kill)
            mooncake_url = f"{master.url}?segment=0"
        if mooncake_url is not None:
            opened["mooncake"] = MooncakeMedium(mooncake_url, FINGERPRINT)
        for medium in opened.values():
            stack.callback(medium.close)
        yield opened


def measure(opened: dict[str, Medium], length: int, repeats: int) -> list[dict[str, Any]]:
    """One row per medium."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"write": [], "find": [], "read": []} for name in opened}
    num_bytes = FINGERPRINT.payload_len(length)
    for number in range(repeats + 1):
        stored = make_stored(FINGERPRINT, key=number.to_bytes(16, "little"), length=length, seed=number)
        for name, medium in opened.items():
            marks = [time.perf_counter()]
            medium.write(stored)
            marks.append(time.perf_counter())
            (info,) = medium.find(stored.info.key)
            marks.append(time.perf_counter())
            found = medium.read(info)
            marks.append(time.perf_counter())
            if not torch.equal(found.k.view(torch.int16), stored.k.view(torch.int16)):
                raise RuntimeError(f"{name}: read back is not what was written")
            medium.delete(info.entry_id)
            if number:  # the first connects
                for step, begin, end in zip(("write", "find", "read"), marks, marks[1:], strict=False):
                    seconds[name][step].append(end - begin)
    return [
        {
            "medium": name,
            "tokens": length,
            "megabytes": num_bytes / 1e6,
            "write": Spread.of([num_bytes / 1e6 / s for s in steps["write"]]).as_dict(),
            "read": Spread.of([num_bytes / 1e6 / s for s in steps["read"]]).as_dict(),
            "find_ms": Spread.of([s * 1e3 for s in steps["find"]]).as_dict(),
        }
        for name, steps in seconds.items()
    ]


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    rows = [
        (
            row["medium"],
            f"{row['tokens']} ({row['megabytes']:.0f} MB)",
            *(Spread(**row[key]).text(digits) for key, digits in (("write", 0), ("read", 0), ("find_ms", 2))),
        )
        for row in report["rows"]
    ]
    head = ["medium", "tokens of a chunk", "written, MB/s", "read, MB/s", "found, ms"]
    shape = "KV of Llama-3.1-8B's shape in bf16; median (min-max); stores on this machine, over its loopback."
    return ["# Throughput of the media", "", *run_markdown(report), shape, "", *markdown_table(head, rows)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="default: a new one in the current folder")
    parser.add_argument("--redis", metavar="URL", help="default: a Valkey server of its own")
    parser.add_argument("--mooncake", metavar="URL", help="default: a master of its own")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "tiers", help="folder of the result files")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {**describe_run(), "rows": []}
    with media(args) as opened:
        for length in LENGTHS:
            report["rows"] += measure(opened, length, args.repeats)
    for path in write_result(args.out, "media", report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
