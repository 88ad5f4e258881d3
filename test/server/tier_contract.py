"""What tests of the tiers need: their configuration, where a chunk's file lies, what a reply and the metrics say.

- `tier_flags` is the configuration as flags, `tier_server` a server with it, `Folder` a disk tier as the tests see it.
- `tiers` reads a reply, `metric` one value of `/metrics`, `wait_until` waits for what happens on its own.
- `store_on` puts chunks into a tier, `written` waits for what does, `kill_while_writing` ends a server that does.
- `fill_pool` makes every chunk leave the KV pool.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from chunk_cache.keys import Partition, chunk_key
from server import contract
from server.conftest import FLAGS, MAX_TOTAL_TOKENS, STRICT
from server.contract import FULL, Marked, chunk_ids, generated, prime, same_logprobs
from server_fixture import Server

REQUEST_TIMEOUT_S = 90.0
PATIENCE_S = 30.0  # for what takes milliseconds on a quiet machine


def tier_flags(**tiers: Any) -> tuple[str, ...]:
    """Nothing is decided by measured times unless a test says so: `controller` is off."""
    config = {"tiers": {"controller": False, **tiers}}
    return ("--enable-metrics", "--chunk-cache", "--chunk-cache-config", json.dumps(config))


def tier_server(model: Path, *flags: str, variables: Mapping[str, str] | None = None, **options: Any) -> Server:
    """Of `flags` that are named twice the last ones count; `variables` are of its environment."""
    env = {**STRICT, **(variables or {})}
    return Server(model, *FLAGS, *flags, env=env, request_timeout_s=REQUEST_TIMEOUT_S, **options)


def tiers(reply: Mapping[str, Any]) -> list[str | None]:
    """Where the KV of each chunk was."""
    return [chunk.get("tier") for chunk in reply["chunks"]]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Returns its value once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


@contextmanager
def written(server: Server, tier: str, num: int) -> Iterator[None]:
    """What is computed inside is written at the end: so many variants."""
    done = metric(server, "writes_total", tier=tier, outcome="ok") + num
    yield
    wait_until(lambda: metric(server, "writes_total", tier=tier, outcome="ok") >= done, "not written")


def store_on(server: Server, tier: str, chunks: list[str], **body: Any) -> None:
    """Computes chunks, and returns when the tier has them."""
    with written(server, tier, len(chunks)):
        prime(server, chunks, **body)


def kill_while_writing(server: Server, prompts: Sequence[Marked], is_time: Callable[[], bool]) -> None:
    """SIGKILL to all processes of a server that computes the prompts' chunks, once it is time."""

    def ask(prompt: Marked) -> None:
        body = {"text": prompt.text, "sampling_params": {"max_new_tokens": 1}}
        with suppress(httpx.TransportError):  # killed
            httpx.post(f"{server.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, prompt) for prompt in prompts]
        wait_until(is_time, "nothing is written")
        os.killpg(server.pid, signal.SIGKILL)
        for one in running:
            one.result(timeout=REQUEST_TIMEOUT_S)


class Folder:
    """A disk tier's folder; chunks are texts of `Passages`."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path = path
        self._tokenizer = tokenizer

    def files(self, chunk: str | None = None, partition: Partition | None = None) -> list[Path]:
        """Of one chunk, or all, in order of their paths; one file for each rank and each variant."""
        if chunk is None:
            return sorted(self.path.glob("*/*/*/*.kv"))
        key = chunk_key(partition or Partition(), chunk_ids(self._tokenizer, chunk)).hex()
        return sorted(self.path.glob(f"*/{key[:2]}/{key}/*.kv"))

    def wait_for(self, *chunks: str, num: int = 1, partition: Partition | None = None) -> list[Path]:
        """The files of chunks, once each has so many."""
        found = []
        for chunk in chunks:
            found += wait_until(
                lambda chunk=chunk: (files := self.files(chunk, partition)) if self._has(chunk, num, partition) else [],
                f"no {num} files of {chunk!r}",
            )
        return found

    def _has(self, chunk: str, num: int, partition: Partition | None) -> bool:
        return len(self.files(chunk, partition)) >= num


def flip_a_byte(path: Path) -> None:
    """In the middle, which is KV."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def metric(server: Server, name: str, **labels: str) -> float:
    """Of `sglang:chunk_cache_tier_<name>`, as of `contract.metric`."""
    return contract.metric(server, f"tier_{name}", **labels)


def fill_pool(server: Server) -> None:
    """Computes so many tokens, none of them a chunk, that whatever nobody reads leaves the pool."""
    rng = random.Random(time.monotonic_ns())
    for _ in range(7):
        server.generate([rng.randrange(10, 262) for _ in range(MAX_TOTAL_TOKENS // 5)], max_new_tokens=1)


def reuse(server: Server, prompt: Marked, tokenizer: Any, **body: Any) -> tuple[Any, Mapping[str, Any]]:
    """The output at ratio 1.0 with log-probabilities, and the checked reply."""
    out = server.generate(prompt.text, logprobs=True, chunk_cache=FULL, **body)
    return out, generated(out, prompt.spans(tokenizer))


def assert_right(server: Server, prompt: Marked, out: Any, **body: Any) -> None:
    """The output is that of the same server without chunk reuse."""
    off = server.generate(prompt.text, logprobs=True, chunk_cache={"mode": "off"}, **body)
    same_logprobs(out, off)
