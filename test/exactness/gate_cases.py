"""Verification of fused replies as scenarios for `exactness.runner`: what it finds, and what hits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from chunk_cache.gate.verification_queue import VerificationQueue
from exactness.cases import Prompt, Session
from exactness.tier_cases import only_on_disk
from local_scheduler import Reply, Request
from sglang_chunk_cache.verification.exact_pass import ExactPass

__all__ = ["CASES", "Session"]

VOCAB_SIZE = 512
FAULTS = ("flush", "evict", "abort", "weights_in_flight", "weights")


def gate_of(s: Session) -> Any:
    """The server's, as after a start."""
    gate = s.local.cache.chunks.gate
    gate.forget()
    gate.queue = VerificationQueue(gate.queue.share)
    return gate


def state_of_pool(s: Session) -> dict[str, Any]:
    """All that a verification must leave as it is."""
    scheduler, chunks = s.local.scheduler, s.local.cache.chunks
    chunks.check_integrity()
    return {
        "used": s.local.num_used_slots(),
        "rows": scheduler.req_to_token_pool.available_size(),
        "evictable": s.local.cache.evictable_size(),
        "index": chunks.manager.index.stats(),
        "store": chunks.store.version,
        "uses": [(v.variant_id, v.num_uses) for v in chunks.manager.index],
        "forwards": scheduler.forward_ct,
    }


@contextmanager
def holding(gate: Any) -> Iterator[None]:
    """Nothing is verified inside."""
    gate.queue.take = lambda num_free: None
    try:
        yield
    finally:
        del gate.queue.take


def idle(s: Session, num_steps: int = 40) -> None:
    """So many turns of the event loop in which nothing comes."""
    s.local.run(lambda step: [] if step < num_steps else None)


def fused_requests(s: Session, num: int, ratio: float | None = 0.1, **fields: Any) -> list[Request]:
    """Stored chunks in other orders, so that all are brought in."""
    chunks = s.chunks(60, 44, 71, 52)
    s.prime(chunks)
    requests = []
    for _ in range(num):
        order = s.rng.sample(range(4), 3)
        prompt = s.prompt([s.tokens(5), *(chunks[i] for i in order)], question=6)
        del prompt.spans[0]
        options: dict[str, Any] = {"spans": prompt.spans}
        if ratio is not None:
            options["ratio"] = ratio
        requests.append(Request(prompt.ids, options, num_top=VOCAB_SIZE, **fields))
    return requests


def exact_ones(s: Session, requests: list[Request], replies: list[Reply]) -> list[Reply]:
    """The same prompts with the answers behind them, computed by SGLang."""
    found = []
    for request, reply in zip(requests, replies, strict=True):
        ids = [*request.ids, *reply.output_ids]
        teacher = Request(
            ids, {"mode": "off"}, max_new_tokens=1, logprob_start=len(request.ids) - 1, num_top=VOCAB_SIZE
        )
        first = replace(request, chunk_cache={"mode": "off"}, rid="", max_new_tokens=1)
        found += s.local.generate([first]) + s.local.generate([teacher])
    return found


def case_measures(s: Session) -> dict[str, Any]:
    """Replies, what the gate found of them, and the same computed by requests."""
    gate = gate_of(s)
    requests = fused_requests(s, 8, max_new_tokens=6)
    with holding(gate):
        replies = [reply for request in requests for reply in s.local.generate([request])]
    before = state_of_pool(s)
    idle(s)
    after, stats = state_of_pool(s), gate.stats()
    exact = exact_ones(s, requests, replies)
    return {"replies": replies, "before": before, "after": after, "stats": stats, "exact": exact}


def case_arrivals(s: Session) -> dict[str, Any]:
    """A request comes after each number of steps of a verification; what happened between, in order."""
    gate, step, scheduler = gate_of(s), ExactPass.step, s.local.scheduler
    run_batch = scheduler.run_batch
    long = s.chunks(300, 300)
    s.prime(long)
    orders: list[list[str]] = []

    def record(exact_pass: ExactPass) -> None:
        orders[-1].append("step")
        step(exact_pass)

    def record_batch(batch: Any, *args: Any) -> Any:
        orders[-1].append("forward")
        return run_batch(batch, *args)

    ExactPass.step = record  # type: ignore[method-assign]
    try:
        for wait in range(5):
            prompt = s.prompt([s.tokens(3), long[wait % 2], long[1 - wait % 2]], question=4)
            del prompt.spans[0]
            plain = s.local.prepare(s.request(Prompt().text(s.tokens(30)), marked=False))
            with holding(gate):
                s.local.generate([s.request(prompt, ratio=0.1)])
            orders.append([])
            scheduler.run_batch = record_batch

            def on_step(_: int, wait: int = wait, plain: Any = plain) -> list[Any] | None:
                order = orders[-1]
                if "request" in order:
                    return None
                if len(order) < wait:
                    return []
                order.append("request")
                return [plain]

            s.local.run(on_step)
            scheduler.run_batch = run_batch
            idle(s)
    finally:
        ExactPass.step = step  # type: ignore[method-assign]
    return {"orders": orders, "stats": gate.stats()}


def case_faults(s: Session) -> dict[str, Any]:
    """Replies that wait, and requests in flight, while all is flushed, evicted, aborted and updated."""
    gate = gate_of(s)
    found: dict[str, Any] = {}
    for fault in FAULTS:
        requests = fused_requests(s, 3, max_new_tokens=30)
        messages = [s.local.prepare(request) for request in requests]

        def on_step(step: int, fault: str = fault, messages: list[Any] = messages) -> list[Any] | None:
            s.local.cache.chunks.check_integrity()
            if step == 0:
                return messages
            if step == 6 and fault == "abort":
                return [s.local.abort(messages[0].rid)]
            if step == 6 and fault == "weights_in_flight":
                gate.forget()
            return [] if step < 8 else None

        with holding(gate):
            s.local.run(on_step)
        waiting = gate.queue.stats()["waiting"]
        if fault == "flush":
            found["flushed"] = s.local.flush()
        if fault == "weights":
            from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

            path = s.local.scheduler.server_args.model_path
            update = UpdateWeightFromDiskReqInput(model_path=path, load_format="auto")
            assert s.local.scheduler.weight_updater.update_weights_from_disk(update).success
        if fault == "evict":
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            s.local.cache.evict(EvictParams(num_tokens=s.local.scheduler.max_total_num_tokens))
        idle(s)
        state_of_pool(s)
        found[fault] = (waiting, gate.queue.stats())
    return found


def case_target(s: Session) -> list[dict[str, Any]]:
    """Requests that say nothing, one by one with time to verify each; what the replies say of them."""
    gate_of(s)
    found = []
    for request in fused_requests(s, 40, ratio=None, max_new_tokens=2):
        (reply,) = s.local.generate([request])
        idle(s, 3)
        found.append(reply.info)
    named = fused_requests(s, 1, ratio=0.2, max_new_tokens=2)
    (reply,) = s.local.generate(named)
    return [*found, reply.info]


def case_learning(s: Session) -> dict[str, Any]:
    """What is known at the start, and how the next request is served; then some more is learned."""
    known = s.local.cache.chunks.gate.stats()
    first, *others = fused_requests(s, 4, ratio=None, max_new_tokens=2)
    (reply,) = s.local.generate([first])
    for request in others:
        idle(s, 3)
        s.local.generate([request])
    idle(s)
    return {"known": known, "reply": reply.info, "learned": s.local.cache.chunks.gate.stats()}


def case_tiers(s: Session) -> dict[str, Any]:
    """Chunks are on disk only, and wanted: first at the least ratio, then exactly."""
    gate = gate_of(s)
    requests = fused_requests(s, 8, ratio=None, max_new_tokens=2)
    only_on_disk(s)
    (loaded,) = s.local.generate(requests[:1])
    for request in requests[1:7]:
        s.local.generate([request])
        idle(s, 3)
    only_on_disk(s)
    before = s.local.cache.chunks.tiers.stats()["tiers"]["disk"]
    (exact,) = s.local.generate(requests[7:])
    after = s.local.cache.chunks.tiers.stats()["tiers"]["disk"]
    return {"loaded": loaded.info, "exact": exact.info, "disk": (before, after), "places": gate.controller.states()}


def case_full_pool(s: Session) -> dict[str, Any]:
    """No slot is free: nothing is evicted for a verification."""
    gate = gate_of(s)
    requests = fused_requests(s, 2, max_new_tokens=4)
    with holding(gate):
        s.local.generate(requests)
        while s.local.scheduler.token_to_kv_pool_allocator.available_size() > 100:
            s.local.generate([s.request(Prompt().text(s.tokens(90)), marked=False)])
    before = state_of_pool(s)
    idle(s)
    after, stats = state_of_pool(s), gate.stats()
    assert s.local.flush()
    idle(s)
    return {"before": before, "after": after, "stats": stats, "room": gate.queue.stats()}


CASES: dict[str, Callable[[Session], Any]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}
