"""Waiting: handlers that let a request wait for its chunks in SGLang's queue, and nobody else with it.

Verbs (handlers of hooks): `add_request_to_queue` (its loads begin), `get_new_batch_prefill_raw` (those whose loads run
are not seen by this scheduling step), `init_next_round_input` (what was found goes into the pool, and then SGLang
matches), `weights_changed` (KV of the old weights is of no use).

Promises: a request that waits keeps its place in the queue. A step costs a look at each request of the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_chunk_cache.request_state import state_of
from sglang_chunk_cache.tiers.loader import Wanted

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_chunk_cache.tiers.manager import ChunkTiers

IDLE_WAIT_S = 0.002
"""How long a step with nothing else to do waits for a load: the workers need the interpreter too."""


def _tiers_of(tree_cache: Any) -> ChunkTiers | None:
    return getattr(tree_cache, "tiers", None)


def add_request_to_queue(_result: None, scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any) -> None:
    """AFTER `Scheduler._add_request_to_queue`."""
    tiers = _tiers_of(scheduler.tree_cache)
    if tiers is None or not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
        return  # refused: the queue is full
    tiers.want(
        req.rid,
        _wanted(scheduler.tree_cache, req),
        num_keys=len(req.origin_input_ids),
        num_rows_ahead=sum(_num_rows(other) for other in scheduler.waiting_queue[:-1]),
    )


def _wanted(tree_cache: Any, req: Req) -> list[Wanted]:
    state = state_of(req)
    if state is None or state.options.mode != "auto" or state.unsupported:
        return []
    return [
        Wanted(key, req.origin_input_ids[start:end], state.partition)
        for key, (start, end) in zip(state.keys, state.options.spans, strict=True)
        if not tree_cache.has(key)
    ]


def _num_rows(req: Req) -> int:
    """That a waiting request will compute, as far as is known."""
    state = state_of(req)
    return len(req.origin_input_ids) if state is None or state.plan is None else state.plan.num_rows


def get_new_batch_prefill_raw(original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Scheduler._get_new_batch_prefill_raw`."""
    tiers = _tiers_of(scheduler.tree_cache)
    if tiers is None:
        return original(scheduler, *args, **kwargs)
    if scheduler.grammar_manager.has_waiting_grammars():
        # As the original begins; here, so that their loads are known before anybody is admitted.
        for req in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    queue = scheduler.waiting_queue
    tiers.poll([req.rid for req in queue])
    scheduler.tree_cache.landings.poll()
    held = {id(req) for req in queue if tiers.is_held(req.rid)}
    if not held:
        return original(scheduler, *args, **kwargs)
    scheduler.waiting_queue = [req for req in queue if id(req) not in held]
    is_alone = not scheduler.waiting_queue
    try:
        new_batch, running_batch = original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = _merge(queue, scheduler.waiting_queue, held)
    if is_alone and new_batch is None and running_batch.is_empty():
        tiers.wait(IDLE_WAIT_S)
    return new_batch, running_batch


def _merge(before: list[Req], after: list[Req], held: set[int]) -> list[Req]:
    """The requests that are still waiting, in SGLang's newest order, those held at the places that they had."""
    merged, rest = [], iter(after)
    left = {id(req) for req in after}
    for req in before:
        if id(req) in held:
            merged.append(req)
        elif id(req) in left:
            merged.append(next(rest))
    return merged + list(rest)


def init_next_round_input(
    original: Callable[..., None], req: Req, tree_cache: Any = None, *args: Any, **kwargs: Any
) -> None:
    """AROUND `Req.init_next_round_input`."""
    tiers = _tiers_of(tree_cache)
    state = None if tiers is None else state_of(req)
    if tiers is not None and state is not None:
        outcome = tiers.bring_in(req.rid)
        if outcome:
            state.tiers = outcome
    original(req, tree_cache, *args, **kwargs)


def weights_changed(_result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER the updates of `SchedulerWeightUpdaterManager`, whether they say that they succeeded or not."""
    tiers = _tiers_of(updater.scheduler.tree_cache)
    if tiers is not None:
        tiers.disable("the weights were changed; start the server anew to have them again.")
