"""`/v1/messages`: the reply in messages of Anthropic.

Marks are found when the body is read (`chunk_cache/prompt/marked_body.py`); SGLang turns the request into a chat, in
which the marks are tags. The reply is `sglext.chunk_cache`, as on the OpenAI routes, and two fields of `usage`; in a
stream both are in the event `message_start`. Tokens from chunks count in `input_tokens`, never in
`cache_read_input_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.anthropic.protocol import (
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
    AnthropicUsage,
)
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.api.exchange import Exchange
from sglang_chunk_cache.api.prepare import PromptTooLong
from sglang_chunk_cache.api.replies import USAGE_KEYS, Replies
from sglang_chunk_cache.flags.server_args import attached

_START = "event: message_start\ndata: "


class _Usage(AnthropicUsage):
    """Usage with the counts of the chunk cache."""

    chunk_reused_tokens: int
    chunk_recomputed_tokens: int


class _Message(AnthropicMessagesResponse):
    """Message with the reply of the chunk cache."""

    usage: _Usage
    sglext: Any


class ChunkAnthropicServing(AnthropicServing):
    async def handle_count_tokens(self, request: Any, raw_request: Any) -> Any:
        """Counts the tokens that the same body would give to the model on `/v1/messages`."""
        chat = self.openai_serving_chat
        if attached(chat.tokenizer_manager.server_args) is None:
            return await super().handle_count_tokens(request, raw_request)
        try:
            message = AnthropicMessagesRequest(**{**dict(request), "max_tokens": 1})
            asked = self._convert_to_chat_completion_request(message)
            adapted, _ = chat._convert_to_internal_request(asked, raw_request)
            ids = adapted.input_ids
            if adapted.contains_mm_input() and not chat.tokenizer_manager.keeps_images_on_gpu:
                ids = await chat.tokenizer_manager.ids_with_images(adapted)
        except PromptTooLong as error:
            return JSONResponse({"input_tokens": error.num_tokens})
        except Exception as error:  # noqa: BLE001  (as SGLang's own: whatever cannot be converted is a bad request)
            return self._error_response(HTTPStatus.BAD_REQUEST, "invalid_request_error", str(error))
        if ids is None:
            ids = chat.tokenizer_manager.tokenizer.encode(adapted.text)
        return JSONResponse({"input_tokens": len(ids)})

    def _convert_response(self, response: Any) -> Any:
        message = super()._convert_response(response)
        reply = getattr(response.sglext, KEY, None)
        if reply is None:
            return message
        details = response.usage.prompt_tokens_details.model_dump()
        usage = _Usage(**message.usage.model_dump(), **{key: details[key] for key in USAGE_KEYS})
        return _Message(**{**dict(message), "usage": usage, "sglext": {KEY: reply}})

    async def _generate_anthropic_stream(
        self, adapted_request: Any, processed_request: Any, anthropic_request: Any, raw_request: Any
    ) -> AsyncIterator[str]:
        replies = Exchange.of(raw_request).replies
        events = super()._generate_anthropic_stream(adapted_request, processed_request, anthropic_request, raw_request)
        async for event in events:
            yield _with_reply(event, replies) if event.startswith(_START) else event


def _with_reply(event: str, replies: Replies) -> str:
    reply = replies.merged()
    if reply is None:
        return event
    body = json.loads(event.removeprefix(_START))
    body["message"]["usage"] |= replies.usage(1)
    body["message"]["sglext"] = {KEY: reply}
    return f"{_START}{json.dumps(body)}\n\n"
