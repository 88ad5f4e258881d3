"""Requests that stand in each other's way: for memory, and for places in a decode batch."""

from __future__ import annotations

from typing import Any

from chunk_cache.keys import Partition, chunk_key
from exactness.cases import Prompt, Session
from local_scheduler import Reply, Request
from sglang_chunk_cache.admin.scheduler_side import ChunkCachePinReq
from sglang_chunk_cache.host.admin_requests import _answer


def beside_steps(s: Session, method: str) -> list[Reply]:
    """A prompt whose first step is shorter than a step may be, and one with few rows that would fit beside it."""
    chunks = s.chunks(250, 250)
    s.prime(chunks)
    long = Prompt().text([1, *s.tokens(19)])
    for chunk in chunks:
        long.chunk(chunk)
    long.text(s.tokens(60))
    short = s.prompt(chunks[::-1])
    asked = [(long, 4, {"method": method, "ratio": 0.1}), (short, 8, {"method": "near", "ratio": 0.02})]
    return s.local.generate(
        [Request(one.ids, {"spans": one.spans, **how}, max_new_tokens=n, logprobs=False) for one, n, how in asked]
    )


def pin_between_steps(s: Session) -> dict[str, Any]:
    """Passages are pinned while a prompt is computed that needs nearly all of the pool."""
    chunks = s.chunks(240, 240)
    s.prime(chunks)
    pinned: list[Any] = []

    def on_step(step: int) -> list[Any] | None:
        if step == 0:
            return [s.local.prepare(Request(s.tokens(800), None, logprobs=False))]
        if step in (4, 30):
            keys = [chunk_key(Partition(), chunk) for chunk in chunks]
            pinned.append(_answer(s.local.scheduler, ChunkCachePinReq(keys=keys, until=1e18)).ranks[0])
        return [] if step < 30 else None

    (reply,) = s.local.run(on_step)
    return {"reply": reply, "refused": [one["is_refused"] for one in pinned]}


def beam_beside_packed(s: Session) -> list[Reply]:
    """A beam has more rows in a decode batch than requests; another request there has lost tokens of its prompt."""
    chunks = s.chunks(40, 33, 51)
    s.prime(chunks)
    one = s.prompt(chunks, question=40)
    options = {"spans": one.spans, "ratio": 0.2, "keep_tokens": 120}
    kept = Request(one.ids, options, max_new_tokens=30, logprobs=False)

    def on_step(step: int) -> list[Any] | None:
        if step == 0:
            return [s.local.prepare(kept)]
        if step == 6:
            beam = s.local.prepare(Request(s.tokens(30), None, max_new_tokens=6, logprobs=False))
            beam.sampling_params.beam_width = 2
            return [beam]
        return [] if step < 6 else None

    return s.local.run(on_step)


def question_beside_decoding(s: Session, num_in_front: int) -> list[Reply]:
    """A prompt whose question chooses rows, alone and beside requests that decode in the same steps."""
    chunks, question = s.chunks(60, 50), s.tokens(50)
    in_front = [*s.system, *s.tokens(num_in_front)]
    replies = []
    for num_decoding in (0, 30):
        s.local.flush()
        s.prime(chunks)
        prompt = Prompt().text(list(in_front)).chunk(chunks[1]).chunk(chunks[0]).text(question)
        options = {"spans": prompt.spans, "method": "fusionrag", "ratio": 0.3, "explain": True}
        others = [Request(s.tokens(2), None, max_new_tokens=40, logprobs=False) for _ in range(num_decoding)]
        replies.append(_asked_beside(s, Request(prompt.ids, options, logprobs=False), others))
    return replies


def _asked_beside(s: Session, asked: Request, others: list[Request]) -> Reply:
    """The reply to a request that comes once the others decode."""
    has_come = False

    def on_step(step: int) -> list[Any] | None:
        nonlocal has_come
        if step == 0 and others:
            return [s.local.prepare(one) for one in others]
        if has_come:
            return None
        has_come = len(s.local.scheduler.running_batch.reqs) >= len(others)
        return [s.local.prepare(asked)] if has_come else []

    return s.local.run(on_step, max_steps=1000)[-1]


CASES = {"beside_steps_near": lambda s: beside_steps(s, "near")}
CASES |= {"beside_steps_fusionrag": lambda s: beside_steps(s, "fusionrag")}
CASES |= {"pin_between_steps": pin_between_steps, "beam_beside_packed": beam_beside_packed}
CASES |= {"question_beside_decoding": question_beside_decoding}
__all__ = ["CASES", "Session"]
