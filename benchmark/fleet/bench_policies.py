"""Policies of SGLang's model gateway on two real servers: rows, hits and time to the answer, on a real trace in small.

    python benchmark/fleet/bench_policies.py RAGPULSE [--requests N] [--share S] [--out FOLDER]

The first requests of RAGPulse, every length multiplied by the share, are sent by four clients, one after the other, to
a gateway with each policy in turn; the servers' caches are flushed in between. `held` is a client that steers by
`ReplicaKeys`, to the replica from which replies said that the passages came. Needs the gateway (make gateway).
Results: `benchmark/results/fleet/policies.*`; the same at scale, without time: `simulate.py fleet`.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import httpx
import numpy as np
from benchmark.common.models import BOS, SPECIAL_TOKENS, LlamaShape, cached_llama
from benchmark.common.ragpulse import read_ragpulse
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.serving.prompt import Prompt
from benchmark.serving.traces import from_ragpulse

from chunk_cache_tools.jsonl import DataError
from chunk_cache_tools.routing import KEY_HEADER, REPLICA_HEADER, ReplicaKeys, routing_key
from gateway import QUICK, Gateway, find_gateway

SHAPE = LlamaShape(layers=8, hidden=256, heads=4, kv_heads=4, intermediate=704, vocab=4096)
POOL_TOKENS = 100_000
"""Of a replica, before the share."""
RATIO = 0.15
NUM_CLIENTS = 4


@dataclass
class Run:
    """The requests with one policy; `held` is what replies have told of each passage's place."""

    flags: Sequence[str]
    key_of: Callable[[Run, Prompt], str]
    rows: int = 0
    tokens: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    replicas: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    keys: ReplicaKeys = field(default_factory=ReplicaKeys)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _held_key(run: Run, prompt: Prompt) -> str:
    places = Counter(run.held[chunk.key] for chunk in prompt.chunks if chunk.key in run.held)
    if len(run.keys.replicas()) < 2 or not places:
        return run.keys.new_key()
    least = min(run.keys.replicas(), key=lambda one: run.replicas[one])
    best = max(run.keys.replicas(), key=lambda one: (places[one], one == least))
    is_busy = run.replicas[best] > 1.25 * (1 + run.replicas.total() / 2)
    return run.keys.key_to(least if is_busy else best)


HASHING = ("--policy", "consistent_hashing")
POLICIES: dict[str, Callable[[], Run]] = {
    "random": lambda: Run(("--policy", "random"), lambda run, prompt: ""),
    "round_robin": lambda: Run(("--policy", "round_robin"), lambda run, prompt: ""),
    "cache_aware": lambda: Run(("--policy", "cache_aware"), lambda run, prompt: ""),
    "consistent_hashing, by session": lambda: Run(HASHING, lambda run, prompt: f"session-{prompt.session}"),
    "consistent_hashing, by routing_key": lambda: Run(
        HASHING, lambda run, prompt: routing_key(chunk.key for chunk in prompt.chunks)
    ),
    "consistent_hashing, by what is held": lambda: Run(HASHING, _held_key),
}


def body_of(prompt: Prompt) -> dict[str, Any]:
    ids = [SPECIAL_TOKENS.index(BOS), *prompt.head]
    spans = []
    for chunk in prompt.chunks:
        spans.append([len(ids), len(ids) + len(chunk.content)])
        ids += chunk.content
    params = {"temperature": 0, "max_new_tokens": 1, "custom_params": {"chunk_cache": {"spans": spans}}}
    return {"input_ids": [*ids, *prompt.tail], "sampling_params": params}


def measure(run: Run, prompts: Sequence[Prompt], servers: Sequence[Server]) -> None:
    """Sends all; fills the run."""
    for server in servers:
        server.flush()
    with Gateway([server.url for server in servers], *run.flags, *QUICK) as gateway:
        waiting = iter(prompts)
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for one in [pool.submit(_client, run, waiting, gateway.url) for _ in range(NUM_CLIENTS)]:
                one.result()


def _client(run: Run, waiting: Any, url: str) -> None:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        while True:
            with run.lock:
                prompt = next(waiting, None)
                if prompt is None:
                    return
                key = run.key_of(run, prompt)
            began = time.perf_counter()
            response = http.post("/generate", json=body_of(prompt), headers={KEY_HEADER: key} if key else {})
            seconds = time.perf_counter() - began
            response.raise_for_status()
            with run.lock:
                run.seconds.append(seconds)
                _note(run, prompt, key, response)


def _note(run: Run, prompt: Prompt, key: str, response: httpx.Response) -> None:
    meta = response.json()["meta_info"]
    replica = response.headers[REPLICA_HEADER]
    run.replicas[replica] += 1
    run.tokens += meta["prompt_tokens"]
    reply = meta.get("chunk_cache")
    if reply is None:
        run.rows += meta["prompt_tokens"] - meta["cached_tokens"]
    else:
        run.rows += reply["computed_tokens"] + reply["recomputed_tokens"]
        run.chunks.update(chunk["status"] for chunk in reply["chunks"])
    run.held.update({chunk.key: replica for chunk in prompt.chunks})
    if key.startswith("any-"):
        run.keys.note(key, response.headers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="RAGPULSE", help="folder of the trace")
    parser.add_argument("--requests", type=int, default=600, help="so many, the first ones (default: 600)")
    parser.add_argument("--share", type=float, default=0.2, help="of every length (default: 0.2)")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "fleet", help="folder of the results")
    args = parser.parse_args(argv)
    leave_on_sigterm()
    if find_gateway() is None:
        print("error: the gateway is not installed; run `make gateway`", file=sys.stderr)
        return 2
    try:
        pulse = read_ragpulse(args.folder, args.requests)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    origin = describe_run()
    prompts = from_ragpulse(pulse.scaled(args.share, 0.01), SHAPE.vocab)
    model = cached_llama(SHAPE)
    pool_tokens = round(args.share * POOL_TOKENS)
    flags = ("--dtype", "float32", "--max-total-tokens", str(pool_tokens), "--sleep-on-idle", "--skip-tokenizer-init")
    env = {**offline_env(), "OMP_NUM_THREADS": "1"}
    ours = ("--chunk-cache", "--chunk-cache-ratio", str(RATIO))
    servers = [Server(model, *flags, *ours, env=env) for _ in range(2)]
    runs = {name: make() for name, make in POLICIES.items()}
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, servers))
        measure(Run(("--policy", "round_robin"), lambda run, prompt: ""), prompts[:40], servers)  # not counted
        for name, run in runs.items():
            measure(run, prompts, servers)
            print(name, f"{run.rows:,} rows of {run.tokens:,}", dict(run.chunks), dict(run.replicas), flush=True)
    finally:
        for server in servers:
            server.stop()
    lines = [
        [
            name,
            f"{100 * run.rows / run.tokens:.1f} %",
            f"{100 * (run.chunks['hit'] + run.chunks['prefix']) / run.chunks.total():.1f} %",
            f"{100 * max(run.replicas.values()) / run.replicas.total():.0f} %",
            *(f"{1000 * float(np.quantile(run.seconds, q)):.0f}" for q in (0.5, 0.99)),
        ]
        for name, run in runs.items()
    ]
    header = ["policy", "rows, of the prompt tokens", "passages found", "requests of the busier", "p50, ms", "p99, ms"]
    page = [
        "# Policies of the gateway on two servers",
        "",
        *run_markdown(origin),
        "",
        f"The first {len(prompts):,} requests of RAGPulse, lengths times {args.share:g}, from {NUM_CLIENTS} clients;",
        f"{SHAPE}, random weights; KV pools of {pool_tokens:,} tokens, no store,",
        f"ratio {RATIO:g}, one token answered. Two servers, the gateway and the clients share the cores, so times are",
        "those of the whole machine.",
        "",
        *markdown_table(header, lines),
        "",
        *pulse.markdown(),
    ]
    report = {
        name: {"rows": run.rows, "tokens": run.tokens, "chunks": run.chunks, "replicas": list(run.replicas.values())}
        | {"seconds": {str(q): round(float(np.quantile(run.seconds, q)), 4) for q in (0.5, 0.9, 0.95, 0.99)}}
        for name, run in runs.items()
    }
    for path in write_result(args.out, "policies", {"run": origin, "policies": report}, page):
        print(f"written: {path}")
    print("\n".join(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
