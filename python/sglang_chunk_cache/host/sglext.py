"""`sglext.chunk_cache` and details of `usage`: the reply in the responses of the OpenAI routes.

Verbs: `add_reply` (to a whole response), `end_with_reply` (to a stream, in an event of its own before the last one,
and in the event with its usage). One prompt with n = 1 gets one object, several choices get a list of objects by
choice index.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sglang.srt.entrypoints.openai import protocol

from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.api.replies import Replies

_DONE = "data: [DONE]\n\n"
_DATA = "data: "
_USAGE_ALONE = '"choices":[],'
"""Text by which the event with the usage of a whole stream is recognized."""


def _open_types() -> None:
    """Lets two of SGLang's types have further fields, and rebuilds the response types that contain them."""
    if protocol.SglExt.model_config.get("extra") == "allow":
        return
    for open_type in (protocol.SglExt, protocol.PromptTokensDetails):
        open_type.model_config["extra"] = "allow"
        open_type.model_rebuild(force=True)
    responses = (f"{kind}{stream}Response" for kind in ("Completion", "ChatCompletion") for stream in ("", "Stream"))
    for name in ("UsageInfo", *responses):
        getattr(protocol, name).model_rebuild(force=True)


def add_reply(response: Any, ret: list[dict[str, Any]], num_choices: int) -> Any:
    """`response` with the replies found in the outputs `ret`, which has `num_choices` outputs for each prompt."""
    replies = Replies.of(ret)
    reply = replies.merged()
    if reply is not None and hasattr(response, "sglext"):
        _open_types()
        response.sglext = response.sglext or protocol.SglExt()
        setattr(response.sglext, KEY, reply)
        response.usage.prompt_tokens_details = _with_counts(response.usage, replies.usage(num_choices))
    return response


def _with_counts(usage: Any, counts: Mapping[str, int]) -> Any:
    """The details of `usage` with our counts; with cached tokens only if SGLang counts them (--enable-cache-report)."""
    stock = usage.prompt_tokens_details
    details = protocol.PromptTokensDetails(**(stock.model_dump() if stock else {}), **counts)
    if stock is None:
        del details.cached_tokens
    return details


async def end_with_reply(events: AsyncIterator[str], replies: Replies, kind: str, request: Any) -> AsyncIterator[str]:
    """The events of a stream, with its reply; `kind` is the field `object` of its events."""
    created = int(time.time())
    event_id = ""
    async for event in events:
        event_id = event_id or str(_body_of(event).get("id", ""))
        reply = replies.merged() if event == _DONE else None
        if reply is not None:
            chunk = {"id": event_id, "object": kind, "created": created, "model": request.model, "choices": []}
            yield f"data: {json.dumps({**chunk, 'sglext': {KEY: reply}})}\n\n"
        yield _with_usage(event, replies, request.n) if _USAGE_ALONE in event else event


def _with_usage(event: str, replies: Replies, num_choices: int) -> str:
    details, body = replies.usage(num_choices), _body_of(event)
    usage = body.get("usage")
    if not details or usage is None:
        return event
    usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), **details}
    return f"{_DATA}{json.dumps(body)}\n\n"


def _body_of(event: str) -> dict[str, Any]:
    """The object of an event; empty where it has none."""
    return json.loads(event.removeprefix(_DATA)) if event.startswith(_DATA + "{") else {}
