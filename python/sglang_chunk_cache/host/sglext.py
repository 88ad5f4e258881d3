"""`sglext.chunk_cache`: the reply in the responses of the OpenAI routes.

Verbs: `add_reply` (to a whole response), `end_with_reply` (to a stream, in an event of its own before the last one),
`collect` (what they say of each choice). One prompt with n = 1 gets one object, several choices get a list of objects
by choice index.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic.fields import FieldInfo
from sglang.srt.entrypoints.openai import protocol

from sglang_chunk_cache.api.prepare import KEY

_DONE = "data: [DONE]\n\n"
_SINK = "chunk_cache_sink"


def _extend_sglext() -> None:
    """Adds the field `chunk_cache` to SGLang's `SglExt`, and to the responses that contain it."""
    if KEY in protocol.SglExt.model_fields:
        return
    protocol.SglExt.__annotations__[KEY] = Any
    protocol.SglExt.__pydantic_fields__[KEY] = FieldInfo(annotation=Any, default=None)
    protocol.SglExt.model_rebuild(force=True)
    protocol.CompletionResponse.model_rebuild(force=True)
    protocol.CompletionStreamResponse.model_rebuild(force=True)
    protocol.ChatCompletionResponse.model_rebuild(force=True)
    protocol.ChatCompletionStreamResponse.model_rebuild(force=True)


def add_reply(response: Any, ret: list[dict[str, Any]]) -> Any:
    """`response`, with the replies of its choices `ret`."""
    reply = _merge({index: item["meta_info"].get(KEY) for index, item in enumerate(ret)})
    if reply is not None and hasattr(response, "sglext"):
        _extend_sglext()
        response.sglext = response.sglext or protocol.SglExt()
        setattr(response.sglext, KEY, reply)
    return response


def _merge(replies: dict[int, Any]) -> Any:
    """One object for one choice, a list by choice index for several; None where there is none."""
    known = [replies[index] for index in sorted(replies)]
    if all(reply is None for reply in known):
        return None
    return known[0] if len(known) == 1 else known


def collect(outputs: AsyncIterator[Any], obj: Any) -> AsyncIterator[Any]:
    """The outputs of a request; where a stream of ours waits for its replies, they are noted for it."""
    sink = getattr(obj, _SINK, None)
    return outputs if sink is None else _note_replies(outputs, sink)


async def _note_replies(outputs: AsyncIterator[Any], sink: dict[int, Any]) -> AsyncIterator[Any]:
    async for out in outputs:
        if isinstance(out, dict):
            index = out.get("index", 0)
            sink[index] = out["meta_info"].get(KEY, sink.get(index))  # None: a choice without marks keeps its place
        yield out


async def end_with_reply(events: AsyncIterator[str], adapted: Any, kind: str, model: str) -> AsyncIterator[str]:
    """The events of a stream; `kind` is what its objects are called."""
    sink: dict[int, Any] = {}
    setattr(adapted, _SINK, sink)
    created = int(time.time())
    event_id = ""
    async for event in events:
        event_id = event_id or _id_of(event)
        reply = _merge(sink) if event == _DONE else None
        if reply is not None:
            chunk = {"id": event_id, "object": kind, "created": created, "model": model, "choices": []}
            yield f"data: {json.dumps({**chunk, 'sglext': {KEY: reply}})}\n\n"
        yield event


def _id_of(event: str) -> str:
    """The id of a response from one of its events; empty where the event has none."""
    if not event.startswith("data: {"):
        return ""
    return str(json.loads(event[len("data: ") :]).get("id", ""))
