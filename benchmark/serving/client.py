"""The load on a server: `closed_loop`, `open_loop`; each gives a `Run` with one `Record` per request.

Clients stream, as users do, and read the clock when the first and the last event arrive. During a run the server is
asked every second for the KV slots in use. A failed request has a record with an `error`, and misses every bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 600.0
SAMPLE_EVERY_S = 1.0


@dataclass(frozen=True)
class Record:
    """One request as its client saw it; seconds count from the beginning of the run.

    Attributes:
        due_s: when it should be sent; time to first token counts from here, so that it includes a client's delay.
        first_s, end_s: arrival of the first token and of the last.
        prompt_len, output_len: tokens.
        prefix_len: tokens of the prompt found in the exact prefix.
        reused_len, recomputed_len: reused tokens, and how many of them were recomputed.
        num_chunks, num_missed: chunks of the prompt, and those that were not stored yet (chunk cache only).
        text: what was generated; empty where the server has no tokenizer.
        error: what went wrong, or None.
    """

    due_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    prompt_len: int = 0
    output_len: int = 0
    prefix_len: int = 0
    reused_len: int = 0
    recomputed_len: int = 0
    num_chunks: int = 0
    num_missed: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time of the whole request."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        return (self.end_s - self.first_s) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def rows(self) -> int:
        """Prompt tokens that the model computed, through all layers or nearly all: methods differ in the first."""
        return self.prompt_len - self.prefix_len - self.reused_len + self.recomputed_len


@dataclass(frozen=True)
class Run:
    """All records of a run, in the order of sending; `slots` are the samples of KV slots in use."""

    records: tuple[Record, ...]
    seconds: float
    slots: tuple[int, ...]

    @property
    def answered(self) -> list[Record]:
        """Records of requests that did not fail."""
        return [record for record in self.records if record.error is None]


def joined(runs: Sequence[Run]) -> Run:
    """Several successive runs as one; the times of a record still count from the beginning of its own run."""
    return Run(
        tuple(record for run in runs for record in run.records),
        sum(run.seconds for run in runs),
        tuple(slots for run in runs for slots in run.slots),
    )


Body = Mapping[str, Any]


def closed_loop(url: str, bodies: Sequence[Body], num_clients: int) -> Run:
    """Each client sends the next body as soon as its last one was answered."""

    async def load(send: Callable[[int, float], Awaitable[None]], began: float) -> None:
        waiting = iter(range(len(bodies)))

        async def client() -> None:
            for number in waiting:
                await send(number, time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(num_clients)))

    return asyncio.run(_run(url, bodies, load))


def open_loop(url: str, bodies: Sequence[Body], arrivals_s: Sequence[float]) -> Run:
    """Sends each body at its time, whether or not the others were answered."""
    assert len(arrivals_s) == len(bodies), "one time per request"

    async def load(send: Callable[[int, float], Awaitable[None]], began: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, due_s in enumerate(arrivals_s):
                await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                tasks.create_task(send(number, due_s))  # type: ignore[arg-type]

    return asyncio.run(_run(url, bodies, load))


async def _run(
    url: str,
    bodies: Sequence[Body],
    load: Callable[[Callable[[int, float], Awaitable[None]], float], Awaitable[None]],
) -> Run:
    records: list[Record | None] = [None] * len(bodies)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        slots: list[int] = []
        sampler = asyncio.create_task(_sample(client, slots))
        began = time.perf_counter()

        async def send(number: int, due_s: float) -> None:
            records[number] = await _ask(client, bodies[number], due_s, began)

        await load(send, began)
        seconds = time.perf_counter() - began
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
    done = tuple(record for record in records if record is not None)
    assert len(done) == len(bodies), "a request was not sent"
    return Run(done, seconds, tuple(slots))


async def _ask(client: httpx.AsyncClient, body: Body, due_s: float, began: float) -> Record:
    first_s, last = 0.0, ""
    try:
        async with client.stream("POST", "/generate", json=dict(body)) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                return Record(due_s, error=f"{response.status_code}: {text[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - began
                    last = line
    except httpx.HTTPError as error:
        return Record(due_s, error=f"{type(error).__name__}: {error}")
    end_s = time.perf_counter() - began
    if not last:
        return Record(due_s, error="the stream ended without an event")
    return record_of(json.loads(last.removeprefix("data: ")), due_s, first_s, end_s)


def record_of(reply: Mapping[str, Any], due_s: float, first_s: float, end_s: float) -> Record:
    """Record of a request, from the last event of its stream."""
    if "error" in reply:
        return Record(due_s, error=str(reply["error"])[:500])
    meta = reply["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return Record(due_s, error=f"aborted: {reason.get('message', '')}"[:500])
    cache = meta.get("chunk_cache")
    chunks = cache["chunks"] if cache else ()
    return Record(
        due_s,
        first_s,
        end_s,
        prompt_len=meta["prompt_tokens"],
        output_len=meta["completion_tokens"],
        prefix_len=meta["cached_tokens"],
        reused_len=cache["reused_tokens"] if cache else 0,
        recomputed_len=cache["recomputed_tokens"] if cache else 0,
        num_chunks=len(chunks),
        num_missed=sum(chunk["status"] not in ("hit", "prefix") for chunk in chunks),
        text=str(reply.get("text", "")),
    )


async def _sample(client: httpx.AsyncClient, slots: list[int]) -> None:
    """Samples until cancelled. During a long forward a server answers late or not at all; then there is no sample."""
    while True:
        await asyncio.sleep(SAMPLE_EVERY_S)
        with contextlib.suppress(httpx.HTTPError):
            response = await client.get("/v1/loads")
            if response.status_code == 200:
                slots.append(int(response.json()["loads"][0]["num_used_tokens"]))
