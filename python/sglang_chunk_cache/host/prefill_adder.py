"""Admission: handlers that make SGLang's prefill scheduler count a fused request as what it is.

Verbs (handlers of hooks): `replay_len` (rows in the loaded range cost compute), `select_prefill_admission` (room for
reused chunks; more rows than one step may compute: alone, whole), `commit_prefill_admission` (statistics, reply),
`prepare_for_extend` (`cached_tokens` counts exact tokens only).

Promises: a fused request is charged the rows that its forward computes, no more and no less. The loaded range is not
split over steps, so a request with more rows than `--chunked-prefill-size` waits until it is the only one of a step
and then goes whole; nothing overtakes it in SGLang's own order of the queue, so it does not starve. A request that
would take the room of reused chunks waits for one that runs, never for nothing. A loaded token is never counted as
cached.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_chunk_cache.maintenance import is_refresh
from sglang_chunk_cache.request_state import PARAM_NAME, DocChunkRequest, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder


def _rows_of_load(req: Req, prefix_len: int) -> int:
    """Rows that the forward adds in front of an extend that starts at `prefix_len`."""
    state = state_of(req)
    if state is None or state.plan is None or state.load_len == 0 or req.kv.holds_kv:
        return 0
    return state.plan.num_load_rows if prefix_len == state.plan.load_end else 0


def replay_len(original: Callable[..., int], adder: PrefillAdder, req: Req, prefix_len: int) -> int:
    """AROUND `PrefillAdder._replay_len`."""
    return original(adder, req, prefix_len) + _rows_of_load(req, prefix_len)


def select_prefill_admission(original: Callable[..., Any], adder: PrefillAdder, req: Req, **kwargs: Any) -> Any:
    """AROUND `PrefillAdder._select_prefill_admission`."""
    if _takes_kept_room(adder, kwargs["total_tokens"]):
        return AddReqResult.NO_TOKEN
    rows = _rows_of_load(req, req.prefix_len + kwargs["host_hit_length"])
    admission = original(adder, req, **kwargs)
    if rows and adder.can_run_list and adder.rem_chunk_tokens is None and not isinstance(admission, AddReqResult):
        # Without chunked prefill SGLang compares the tail alone with --max-prefill-tokens.
        fits = rows + adder.ceil_paged_tokens(admission.extend_len) < adder.rem_input_tokens
        return admission if fits else AddReqResult.OTHER
    if not rows or admission is not AddReqResult.OTHER or adder.can_run_list:
        return admission
    # An empty step has no room for the rows and at least a page of the tail, so it never will have: the tail is sized
    # as if there were no rows, and the step is charged for both, which closes it.
    state = state_of(req)
    assert state is not None
    plan, state.plan = state.plan, None
    try:
        admission = original(adder, req, **kwargs)
    finally:
        state.plan = plan
    if isinstance(admission, AddReqResult):
        return admission
    return dataclasses.replace(admission, replay_len=admission.replay_len + rows)


def _takes_kept_room(adder: PrefillAdder, num_tokens: int) -> bool:
    """Whether so many tokens more would have reused chunks evicted while there are requests that will give theirs back.

    Without this a burst fills the KV pool with running requests, each finds fewer chunks, computes more, and stays
    longer: throughput falls where load is highest. A request that has no room beside them even when it runs alone
    would wait for a server that is empty, and is left to SGLang's own rule.
    """
    if adder.preempt_list or not (adder.can_run_list or (adder.running_batch and adder.running_batch.reqs)):
        return False
    num_kept = adder.tree_cache.num_kept_tokens
    if num_tokens > adder.tree_cache.token_to_kv_pool_allocator.size - num_kept:
        return False
    return adder.rem_total_tokens - num_tokens < num_kept


def commit_prefill_admission(original: Callable[..., None], adder: PrefillAdder, req: Req, *args: Any) -> None:
    """AROUND `PrefillAdder._commit_prefill_admission`."""
    original(adder, req, *args)
    state = state_of(req)
    if state is None or state.plan is None:
        return
    if state.load_due:
        _uncount_loaded(adder, req, state.load_len)
    if state.reported is None:
        _report(adder, req, state)


def _uncount_loaded(adder: PrefillAdder, req: Req, load_len: int) -> None:
    """A load is neither a device nor a host hit: the prompt tokens in it were not found, they were made."""
    adder.log_hit_tokens -= load_len
    adder.log_input_tokens += load_len
    if req.retracted_stain:
        adder.reprocessed_log_hit_tokens -= load_len
        adder.reprocessed_log_input_tokens += load_len
    else:
        adder.log_host_hit_tokens -= load_len


def _report(adder: PrefillAdder, req: Req, state: DocChunkRequest) -> None:
    assert state.plan is not None
    state.reported = state.plan
    if not is_refresh(req.rid):
        adder.tree_cache.chunk_metrics.count_plan(state.plan)
    reply = state.plan.reply(explain=state.options.explain)
    if adder.tree_cache.tiers is not None:
        reply["chunks"] = [
            _with_tier(chunk, key, state) for chunk, key in zip(reply["chunks"], state.keys, strict=True)
        ]
    _write_reply(req, reply)


def _with_tier(chunk: dict[str, Any], key: bytes, state: DocChunkRequest) -> dict[str, Any]:
    """With where its KV was when the request came, for a hit."""
    if chunk["status"] != "hit":
        return chunk
    outcome = state.tiers.get(key)
    return chunk | {"tier": (outcome.tier if outcome is not None else "") or "pool"}


def correct_report(req: Req, state: DocChunkRequest) -> None:
    """The plan has changed during the forward: the reply speaks of the new one."""
    assert state.plan is not None
    state.reported = state.plan
    _write_reply(req, state.plan.reply(explain=state.options.explain))


def complete_report(req: Req, state: DocChunkRequest) -> None:
    """Adds to the reply what the forward chose, once it has run; for requests that asked to explain."""
    report, state.selection_report = state.selection_report, None
    if report is None or state.plan is not state.reported:  # a retracted request's reply speaks of its first forward
        return
    reply = json.loads(req.customized_info[PARAM_NAME][0])
    reply["selection"], per_chunk = report.complete()
    reply["chunks"] = [chunk | found for chunk, found in zip(reply["chunks"], per_chunk, strict=True)]
    _write_reply(req, reply)


def _write_reply(req: Req, reply: dict[str, Any]) -> None:
    """To `api.reply`, which sends it once."""
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info[PARAM_NAME] = [json.dumps(reply)]


def prepare_for_extend(original: Callable[..., None], batch: ScheduleBatch) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`."""
    first_time = [
        (req, state.load_len)
        for req in batch.reqs
        if (state := state_of(req)) is not None and state.load_due and not req.retracted_stain
    ]
    original(batch)
    for req, load_len in first_time:
        req.cached_tokens -= load_len
        req.cached_tokens_host -= load_len
