"""The reply of one request, `meta_info["chunk_cache"]`: an object of JSON values, made when it is sent."""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.request.chunk_request import ChunkRequest, Reported


def whole_reason(state: ChunkRequest, *, has_ended: bool) -> str | None:
    """Why decoding keeps all of a prompt although it was to keep a part; None = it does not, or it is not known yet.

    Args:
        has_ended: the answer is complete.
    """
    kept = state.packing.kept
    if kept is None or state.packing.is_packed:
        return None
    if not kept.num_dropped:
        return "memory"
    return "short_answer" if has_ended else None


def reply_of(state: ChunkRequest, reported: Reported, *, has_ended: bool = True) -> dict[str, Any]:
    """What became of a request when it was first admitted.

    Args:
        reported: the state's.
        has_ended: as of `whole_reason`; until then the reply says what decoding is to keep.
    """
    prompt, plan, kept, decision = state.prompt, reported.plan, state.packing.kept, state.verification.decision
    reply: dict[str, Any] = plan.reply(explain=prompt.options.explain)
    for chunk, name in zip(reply["chunks"], prompt.options.chunk_ids, strict=False):
        if name is not None:
            chunk["id"] = name
    if prompt.is_discovered:
        reply["discovered"] = True
    if prompt.options.keep_tokens or kept is not None:
        reason = whole_reason(state, has_ended=has_ended)
        num_dropped = 0 if kept is None or reason is not None else kept.num_dropped
        reply["kept_tokens"] = plan.prompt_len - num_dropped
        if reason is not None:
            reply["kept_reason"] = reason
    if decision is not None:
        reply["target"] = {"step": decision.number, "reason": decision.reason}
    if state.tiers is not None:
        for chunk, key in zip(reply["chunks"], prompt.keys, strict=True):
            if chunk["status"] == "hit":  # where its KV was when the request came
                outcome = state.tiers.get(key)
                chunk["tier"] = (outcome.tier if outcome is not None else "") or "pool"
    if prompt.answer is not None and prompt.answer.reason != "unsupported":  # the selector was not asked
        reply["selector_seconds"] = prompt.answer.seconds
    if reported.selection is not None:
        reply["selection"], per_chunk = reported.selection.complete()
        for chunk, found in zip(reply["chunks"], per_chunk, strict=True):
            chunk |= found
    return reply
