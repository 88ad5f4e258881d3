"""The reply of one request, `meta_info["chunk_cache"]`: an object of JSON values, made when it is sent."""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.request_state import DocChunkRequest


def reply_of(state: DocChunkRequest) -> dict[str, Any] | None:
    """What became of a request when it was first admitted; None where it never was."""
    plan = state.reported
    if plan is None:
        return None
    reply: dict[str, Any] = plan.reply(explain=state.options.explain)
    if state.is_discovered:
        reply["discovered"] = True
    if state.options.keep_tokens or state.kept is not None:
        reply["kept_tokens"] = plan.prompt_len - (0 if state.kept is None else state.kept.num_dropped)
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
