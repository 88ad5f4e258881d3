"""Traffic on a server with the gate: `prime` stores chunks, `serve` asks at Poisson times and gathers its measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from benchmark.common.server import Server
from benchmark.gate.questions import TokenPrompt
from benchmark.serving.arrivals import poisson

POLL_S = 1.0
BATCH = 64
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Served:
    """One request and its reply.

    Attributes:
        at_s: when it was due, from the beginning of the traffic.
        first: log-probabilities of the first token, by id; all of the vocabulary.
    """

    rid: str
    prompt: TokenPrompt
    at_s: float
    output_ids: tuple[int, ...]
    first: Mapping[int, float]
    info: Mapping[str, Any]


def prime(server: Server, prompts: Sequence[TokenPrompt]) -> None:
    """Every chunk alone behind the head, computed exactly."""
    alone = [one for prompt in prompts for one in prompt.priming]
    for begin in range(0, len(alone), BATCH):
        batch = alone[begin : begin + BATCH]
        options = [{"spans": spans, "mode": "exact"} for _, spans in batch]
        params = [{"max_new_tokens": 1, "custom_params": {"chunk_cache": one}} for one in options]
        server.post("/generate", {"input_ids": [[*ids, 0] for ids, _ in batch], "sampling_params": params})


def serve(
    server: Server, prompts: Sequence[TokenPrompt], *, rate: float, vocab_size: int, max_new_tokens: int, seed: int = 0
) -> tuple[list[Served], dict[str, dict[str, Any]]]:
    """Each prompt once, at Poisson times, naming neither method nor ratio.

    Returns:
        What was served, and what the gate found of those that it verified, by request.
    """
    return asyncio.run(_serve(server.url, prompts, poisson(len(prompts), rate, seed), vocab_size, max_new_tokens))


async def _serve(
    url: str, prompts: Sequence[TokenPrompt], times: Sequence[float], vocab_size: int, max_new_tokens: int
) -> tuple[list[Served], dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, Any]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def poll() -> int:
            (rank,) = (await client.get("/chunk_cache/stats")).raise_for_status().json()["ranks"]
            found.update({one["rid"]: one for one in rank["gate"]["newest"]})
            return int(rank["gate"]["requests"]["waiting"])

        async def watch() -> None:
            while True:
                await poll()
                await asyncio.sleep(POLL_S)

        async def ask(number: int, due_s: float) -> Served:
            await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
            prompt = prompts[number]
            rid = f"{prompt.family}-{number}-{seed_of(times)}"
            params = {
                "max_new_tokens": max_new_tokens,
                "temperature": 0.0,
                "custom_params": {"chunk_cache": {"spans": prompt.spans}},
            }
            body = {"input_ids": prompt.ids, "rid": rid, "sampling_params": params}
            top = {"return_logprob": True, "top_logprobs_num": vocab_size}
            reply = (await client.post("/generate", json=body | top)).raise_for_status().json()
            meta = reply["meta_info"]
            first = {token: logprob for logprob, token, *_ in meta["output_top_logprobs"][0]}
            return Served(rid, prompt, due_s, tuple(reply["output_ids"]), first, meta["chunk_cache"])

        began = time.perf_counter()
        watcher = asyncio.create_task(watch())
        served = await asyncio.gather(*(ask(number, due_s) for number, due_s in enumerate(times)))
        watcher.cancel()
        while await poll():  # the server is idle now, and verifies what waits
            await asyncio.sleep(POLL_S / 4)
    return list(served), found


def seed_of(times: Sequence[float]) -> int:
    """A number that differs from traffic to traffic."""
    return round(1e6 * times[0])
