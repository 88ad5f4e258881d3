"""`/v1/completions`, and what it shares with `/v1/chat/completions`.

Verbs: `handle_request` (refuses a top-level field), `convert_completion` (marks in prompts), `build_response`,
`completion_stream` and `chat_stream` (the reply as `sglext.chunk_cache`).

Promises: a bad request is a 400 also with `stream`; the echo of a prompt has no separators; one prompt with n = 1 gets
one object, several choices get a list of objects by choice index.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic.fields import FieldInfo

from sglang_chunk_cache import server_args as options
from sglang_chunk_cache.api.marks import split_marked
from sglang_chunk_cache.api.prepare import COMPLETION_NAMES, KEY, parse_items, prepare
from sglang_chunk_cache.host.generate import misplaced_error, top_level_error
from sglang_chunk_cache.server_args import ChunkCacheArgs

_DONE = "data: [DONE]\n\n"


async def handle_request(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """AROUND `OpenAIServingBase.handle_request`."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    if raw_request is not None and isinstance(request, (ChatCompletionRequest, CompletionRequest)):
        body, remedy = await raw_request.json(), "custom_params.chunk_cache"
        error = top_level_error(body, remedy) or misplaced_error(body, "sampling_params", "custom_params", remedy)
        if error is not None:
            return serving.create_error_response(error)
    return await original(serving, request, raw_request)


def convert_completion(
    original: Callable[..., tuple[Any, Any]], serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """AROUND `OpenAIServingCompletion._convert_to_internal_request`."""
    manager = serving.tokenizer_manager
    args = options.attached(manager.server_args)
    if args is None:
        return original(serving, request, raw_request)
    is_text = isinstance(request.prompt, str) or (bool(request.prompt) and isinstance(request.prompt[0], str))
    prompt, ids = (request.prompt, None) if is_text else (None, request.prompt)
    parse_items(prompt, ids, {"custom_params": request.custom_params}, args, COMPLETION_NAMES)
    adapted, request = original(serving, request, raw_request)
    prepare(adapted, manager, args, COMPLETION_NAMES)
    if is_text:
        request.prompt = _without_separators(request.prompt, args)
    return adapted, request


def _without_separators(prompt: str | list[str], args: ChunkCacheArgs) -> str | list[str]:
    if isinstance(prompt, list):
        return [_text_of(text, args) for text in prompt]
    return _text_of(prompt, args)


def _text_of(text: str, args: ChunkCacheArgs) -> str:
    marked = split_marked(text, args.separator, COMPLETION_NAMES.text)
    return text if marked is None else marked.text


# Replies.


def extend_sglext() -> None:
    """Adds the field `chunk_cache` to SGLang's `SglExt`, and to the responses that contain it."""
    from sglang.srt.entrypoints.openai import protocol

    if KEY in protocol.SglExt.model_fields:
        return
    protocol.SglExt.__annotations__[KEY] = Any
    protocol.SglExt.__pydantic_fields__[KEY] = FieldInfo(annotation=Any, default=None)
    protocol.SglExt.model_rebuild(force=True)
    for name in (
        "CompletionResponse",
        "CompletionStreamResponse",
        "ChatCompletionResponse",
        "ChatCompletionStreamResponse",
    ):
        getattr(protocol, name).model_rebuild(force=True)


def build_response(
    original: Callable[..., Any], serving: Any, request: Any, ret: list[dict[str, Any]], created: int
) -> Any:
    """AROUND the builders of a whole response, chat and completion."""
    from sglang.srt.entrypoints.openai.protocol import SglExt

    response = original(serving, request, ret, created)
    reply = merge_replies({index: item["meta_info"].get(KEY) for index, item in enumerate(ret)})
    if reply is not None and hasattr(response, "sglext"):
        extend_sglext()
        response.sglext = response.sglext or SglExt()
        setattr(response.sglext, KEY, reply)
    return response


def merge_replies(replies: dict[int, Any]) -> Any:
    """One object for one choice, a list by choice index for several; None where there is none."""
    known = [replies[index] for index in sorted(replies)]
    if all(reply is None for reply in known):
        return None
    return known[0] if len(known) == 1 else known


def completion_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """AROUND `OpenAIServingCompletion._generate_completion_stream`."""
    return _stream(original, serving, adapted, request, raw_request, "text_completion")


def chat_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """AROUND `OpenAIServingChat._generate_chat_stream`."""
    return _stream(original, serving, adapted, request, raw_request, "chat.completion.chunk")


async def _stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, request: Any, raw_request: Any, kind: str
) -> AsyncIterator[str]:
    sink: dict[int, Any] = {}
    adapted.chunk_cache_sink = sink
    created = int(time.time())
    event_id = ""
    async for event in original(serving, adapted, request, raw_request):
        event_id = event_id or _id_of(event)
        reply = merge_replies(sink) if event == _DONE else None
        if reply is not None:
            chunk = {
                "id": event_id,
                "object": kind,
                "created": created,
                "model": request.model,
                "choices": [],
                "sglext": {KEY: reply},
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        yield event


def _id_of(event: str) -> str:
    """The id of a response from one of its events; empty where the event has none."""
    if not event.startswith("data: {"):
        return ""
    return str(json.loads(event[len("data: ") :]).get("id", ""))
