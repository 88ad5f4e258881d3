"""The reply of one request, `meta_info["chunk_cache"]`: an object of JSON values, made when it is sent."""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.request.chunk_request import ChunkRequest


def whole_reason(state: ChunkRequest, *, has_ended: bool) -> str | None:
    """Why a prompt of which decoding was to keep a part has stayed whole; None where it has not, or that is not known.

    Args:
        has_ended: the answer is complete.
    """
    if state.kept is None or state.is_packed:
        return None
    if not state.kept.num_dropped:
        return "memory"
    return "short_answer" if has_ended else None


def reply_of(state: ChunkRequest, *, has_ended: bool = True) -> dict[str, Any] | None:
    """What became of a request when it was first admitted; None where it never was.

    Args:
        has_ended: as of `whole_reason`; before, what decoding is to keep is told.
    """
    plan = state.reported
    if plan is None:
        return None
    reply: dict[str, Any] = plan.reply(explain=state.options.explain)
    if state.is_discovered:
        reply["discovered"] = True
    if state.options.keep_tokens or state.kept is not None:
        reason = whole_reason(state, has_ended=has_ended)
        num_dropped = 0 if state.kept is None or reason is not None else state.kept.num_dropped
        reply["kept_tokens"] = plan.prompt_len - num_dropped
        if reason is not None:
            reply["kept_reason"] = reason
    if state.decision is not None:
        reply["target"] = {"step": state.decision.number, "reason": state.decision.reason}
    if state.tiers is not None:
        for chunk, key in zip(reply["chunks"], state.keys, strict=True):
            if chunk["status"] == "hit":  # where its KV was when the request came
                outcome = state.tiers.get(key)
                chunk["tier"] = (outcome.tier if outcome is not None else "") or "pool"
    if state.prompt.answer is not None and state.prompt.answer.reason != "unsupported":  # nobody was asked
        reply["selector_seconds"] = state.prompt.answer.seconds
    if state.selection_report is not None:
        reply["selection"], per_chunk = state.selection_report.complete()
        for chunk, found in zip(reply["chunks"], per_chunk, strict=True):
            chunk |= found
    return reply
