"""Long runs on one scheduler: memory pressure, retraction, and what fused requests leave behind."""

from __future__ import annotations

from functools import partial
from typing import Any

from exactness.cases import Prompt, Session
from local_scheduler import Reply, Request

METHODS = ["full-reuse", "epic", "random", "full"]


def random_request(s: Session, chunks: list[list[int]], *, max_chunks: int) -> Request:
    """Any mixture of stored and new chunks, plain text, modes, methods, ratios and tenants."""
    rng = s.rng
    prompt = Prompt().text(s.system if rng.random() < 0.9 else s.tokens(rng.randrange(0, 6)))
    for _ in range(rng.randrange(0, max_chunks + 1)):
        if rng.random() < 0.15:
            prompt.text(s.tokens(rng.randrange(1, 20)))
        prompt.chunk(rng.choice(chunks) if rng.random() < 0.9 else s.tokens(rng.randrange(1, 60)))
    if rng.random() < 0.9 or not prompt.ids:
        prompt.text(s.tokens(rng.randrange(1, 25)))
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["ratio"] = rng.choice([0, 0.05, 0.15, 0.5, 1.0])
    if rng.random() < 0.6:
        options["method"] = rng.choice(METHODS)
    if rng.random() < 0.15:
        options["mode"] = rng.choice(["auto", "exact", "off"])
    return Request(
        prompt.ids,
        {"spans": prompt.spans, **options} if rng.random() < 0.85 else None,
        max_new_tokens=rng.choice([0, 1, 2, 5, 20, 40]),
        logprob_start=rng.choice([-1, -1, -1, rng.randrange(0, len(prompt.ids))]),
        extra_key=rng.choice([None, None, None, "tenant"]),
        ignore_eos=rng.random() < 0.5,
    )


def case_random_requests(s: Session, total: int = 300) -> dict[str, int]:
    """Random requests, some aborted, in a pool that holds a few of them; integrity after every step."""
    chunks = s.chunks(*(s.rng.randrange(1, 90) for _ in range(24)))
    sent, live = 0, []
    counts = {"hits": 0, "misses": 0, "memory": 0, "retracted_fused": 0, "aborted": 0, "finished": 0, "steps": 0}

    def on_step(step: int) -> list[Any] | None:
        nonlocal sent
        counts["steps"] = step
        s.local.cache.chunks.check_integrity()
        if sent == total:
            return None
        messages: list[Any] = []
        while sent < total and s.rng.random() < 0.35:
            request = random_request(s, chunks, max_chunks=5)
            messages.append(s.local.prepare(request))
            live.append(request.rid)
            sent += 1
        if live and s.rng.random() < 0.03:
            messages.append(s.local.abort(live.pop(s.rng.randrange(len(live)))))
            counts["aborted"] += 1
        return messages

    for reply in s.local.run(on_step):
        assert reply.finish is not None, reply
        counts["finished"] += 1
        if reply.info is None:
            continue
        statuses = s.statuses(reply)
        counts["hits"] += statuses.count("hit")
        counts["misses"] += statuses.count("miss")
        counts["memory"] += reply.info["fallback_reason"] == "memory"
        counts["retracted_fused"] += reply.retractions > 0 and reply.info["reused_tokens"] > 0
    return counts


def case_22_retraction_of_fused_requests(s: Session) -> list[Reply]:
    """Fused requests that decode together until the pool is full; all at ratio 1.0, so each must equal stock."""
    chunks = s.chunks(40, 33, 51, 64, 45, 38)
    s.prime(chunks)
    requests = []
    for _ in range(10):
        order = s.rng.sample(range(6), 3)
        request = s.request(s.prompt([chunks[i] for i in order]), max_new_tokens=60)
        request.ignore_eos = False
        requests.append(request)
    s.replies += s.local.generate(requests)
    return s.replies


def case_exact_after_fused(s: Session) -> list[Reply]:
    """Hundreds of fused requests, then exact ones: nothing approximate may be left in the exact cache.

    The exact ones run both unmarked and in mode exact, over prompts that the fused ones used as well.
    """
    chunks = s.chunks(40, 33, 51, 64, 45, 38, 29, 70)
    orders = [s.rng.sample(range(8), s.rng.randrange(1, 5)) for _ in range(300)]
    prompts = [s.prompt([chunks[i] for i in order]) for order in orders]
    if s.is_ours:
        for i in range(0, len(prompts), 4):
            s.local.generate(
                [s.request(p, ratio=s.rng.choice([0, 0.1, 0.3]), max_new_tokens=2) for p in prompts[i : i + 4]]
            )
    sample = prompts[::10]
    exact = [s.request(p, marked=i % 2 == 0, options={"mode": "exact"}) for i, p in enumerate(sample)]
    for request in exact:
        s.replies += s.local.generate([request])
    return s.replies


def case_full_reuse_is_another_result(s: Session) -> list[tuple[Reply, Reply]]:
    """Pairs of the same prompt at ratio 0 and in full."""
    chunks = s.chunks(60, 55, 71, 64)
    s.prime(chunks)
    pairs = []
    for order in ([3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        prompt = s.prompt([chunks[i] for i in order])
        reused = s.local.generate([s.request(prompt, options={"method": "full-reuse"})])[0]
        exact = s.local.generate([s.request(prompt, options={"mode": "off"})])[0]
        pairs.append((reused, exact))
    return pairs


CASES = {
    "random_requests": case_random_requests,
    "more_random_requests": partial(case_random_requests, total=1000),
    "22_retraction": case_22_retraction_of_fused_requests,
    "exact_after_fused": case_exact_after_fused,
    "full_reuse": case_full_reuse_is_another_result,
}
