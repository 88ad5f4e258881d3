"""Time to first token of a request whose chunks all lie in one place: each medium, the KV pool, nowhere.

    python benchmark/tiers/bench_first_token.py [--quick] [--repeats N] [--places NAME ...] [--out FOLDER]

One server per place with a tier of that kind only, asked by turns, paused meanwhile; stores run on this machine. Before
a server with a tier is asked, plain prompts as long as its KV pool push the chunks out of it; the reply must say where
each chunk was found. `computed` is stock's full prefill (mode off) on the first server. Results:
`benchmark/results/tiers/first_token.*`, or `.cache/bench/` with `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import LlamaShape, cached_llama
from benchmark.common.results import Spread, describe_run, markdown_table, result_dir, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.tiers.loading import OPTIONS, prime
from benchmark.tiers.prompts import Corpus, Size

from unit.tiers.mooncake_master import MooncakeMaster, library_env
from unit.tiers.stores import STORES, find_store

FULL = Size(LlamaShape(12, 768, 12, 12, 2048, 2048), system_len=64, chunk_len=512, num_chunks=8, question_len=32)
QUICK = Size(LlamaShape(4, 256, 4, 4, 704, 2048), system_len=64, chunk_len=64, num_chunks=8, question_len=32)
POOL, COMPUTED = "pool", "computed"
PLACES = (POOL, "host", "disk", *STORES)
FILLER_LEN = 512


@dataclass(frozen=True)
class Place:
    """Where a server finds chunks; `tier` is what its replies call it, None where it has no tiers."""

    name: str
    tier: str | None
    server: Server
    pool_len: int

    def ask(self, corpus: Corpus, number: int) -> float:
        """Seconds to the first token of a prompt of all chunks, in an order that begins with another one each time."""
        num = corpus.size.num_chunks
        if self.tier:
            for _ in range(-(-self.pool_len // FILLER_LEN)):
                self.server.generate(corpus.tokens(FILLER_LEN), chunk_cache={"mode": "off"})
            self.server.generate(corpus.system, chunk_cache={"mode": "off"})
        prompt = corpus.prompt_of([(number + i) % num for i in range(num)])
        timed = self.server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, **OPTIONS})
        chunks = timed.chunk_cache["chunks"]
        if any(chunk["status"] not in ("hit", "prefix") or chunk.get("tier") != self.tier for chunk in chunks):
            raise RuntimeError(f"{self.name}: not all chunks were found there; the reply: {timed.chunk_cache}")
        return timed.total_s


@contextlib.contextmanager
def places(names: Sequence[str], size: Size, folder: Path) -> Iterator[list[Place]]:
    """Servers that run; stores that are not installed are left out, and said so."""
    model_dir = cached_llama(size.shape)
    with contextlib.ExitStack() as stack:
        found = []
        for name in names:
            tiers: dict[str, Any] = {"host": {"host_bytes": "1GB"}, "disk": {"disk": str(folder / "disk")}}.get(
                name, {}
            )
            if name in STORES:
                there = find_store(name, folder)
                if there is None:
                    print(f"{name}: not installed, left out", file=sys.stderr)
                    continue
                store, url = there
                store.start()
                stack.callback(store.kill)
                if isinstance(store, MooncakeMaster):  # it would drop what a server that is paused lends
                    stack.callback(store.lend("1 GB").kill)
                    url = f"{store.url}?segment=0"
                tiers = {"remote": url}
            pool_len = 5 * size.prompt_len // 2  # what is stored, and the copies of a request
            server = make_server(model_dir, name, tiers, pool_len)
            stack.callback(server.stop)
            found.append(Place(name, ("remote" if name in STORES else name) if tiers else None, server, pool_len))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda place: place.server.start(), found))
        yield found


def make_server(model_dir: Path, name: str, tiers: Mapping[str, Any], pool_len: int) -> Server:
    """A server with these tiers; not started."""
    flags = ["--skip-tokenizer-init", "--max-running-requests", "1", "--chunk-cache"]
    flags += ["--max-total-tokens", str(pool_len)]
    if tiers:
        config = {"tiers": {**tiers, "controller": False, "max_variants_per_chunk": 1}, "keep_share": 0}
        flags += ["--chunk-cache-config", json.dumps(config)]
    log = CACHE_DIR / f"server-first-token-{name}.log"
    return Server(model_dir, *flags, env={**offline_env(), **library_env()}, log_path=log)


def measure(found: Sequence[Place], corpus: Corpus, repeats: int) -> dict[str, list[float]]:
    """Seconds by place; the first round does not count."""
    seconds: dict[str, list[float]] = {COMPUTED: [], **{place.name: [] for place in found}}
    for place in found:
        prime(place.server, corpus, lambda _: None, place.tier)
        place.server.pause()
    for number in range(repeats + 1):
        for place in found:
            place.server.resume()
            seconds[place.name].append(place.ask(corpus, number))
            if place is found[0]:
                prompt = corpus.prompt_of(range(corpus.size.num_chunks))
                timed = place.server.generate(prompt.ids, chunk_cache={"spans": prompt.spans, "mode": "off"})
                seconds[COMPUTED].append(timed.total_s)
            place.server.pause()
        print(", ".join(f"{name} {values[-1]:.3f} s" for name, values in seconds.items()), flush=True)
    return {name: values[1:] for name, values in seconds.items()}


def to_markdown(report: Mapping[str, Any], size: Size) -> list[str]:
    """The page of the result."""
    computed = Spread(**report["seconds"][COMPUTED])
    rows = []
    for name, fields in report["seconds"].items():
        spread = Spread(**fields)
        rows.append((name, spread.text(3), f"{computed.median / spread.median:.1f}x"))
    return [
        "# Time to first token by where the chunks are",
        "",
        *run_markdown(report),
        f"{size.shape}; {size}.",
        "Method `epic` at 15 %, idle server; median seconds (min-max); stores on this machine, over its loopback.",
        "",
        *markdown_table(("chunks", "seconds", "how many times sooner"), rows),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small model and prompts: a check, no result")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--out", type=Path, help="folder of the result files")
    args = parser.parse_args(argv)
    args.out = result_dir(args, "tiers")
    leave_on_sigterm()
    size = QUICK if args.quick else FULL
    corpus = Corpus(size, size.num_chunks)
    with tempfile.TemporaryDirectory(prefix="bench-tiers-") as folder, places(args.places, size, Path(folder)) as found:
        report = describe_run()
        seconds = measure(found, corpus, args.repeats)
    report["seconds"] = {name: Spread.of(values).as_dict() for name, values in seconds.items()}
    page = to_markdown(report, size)
    write_result(args.out, "first_token", report, page)
    print("\n".join(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
