"""`/v1/completions`: marks in prompts, and chunks in front of them. The echo of a prompt has no separators."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from chunk_cache.errors import request_error
from chunk_cache.prompt.marks import split_marked
from sglang_chunk_cache.api.exchange import Exchange
from sglang_chunk_cache.api.prepare import may_get_reply, prepare
from sglang_chunk_cache.api.stock_checks import COMPLETION_NAMES
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, attached
from sglang_chunk_cache.host import sglext


class ChunkServingCompletion(OpenAIServingCompletion):
    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        args = attached(self.tokenizer_manager.server_args)
        if args is None:
            return super()._convert_to_internal_request(request, raw_request)
        exchange = Exchange.of(raw_request)
        _place(request, exchange)
        adapted, request = super()._convert_to_internal_request(request, raw_request)
        names = dataclasses.replace(COMPLETION_NAMES, options=exchange.asked.path)
        prepare(adapted, self.tokenizer_manager, args, names, exchange.marks)
        exchange.awaits_reply = may_get_reply(adapted, args)
        if request.echo:
            request.prompt = _without_marks(request.prompt, exchange, args)
        return adapted, request

    def _build_completion_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        return sglext.add_reply(super()._build_completion_response(request, ret, created), ret, request.n)

    def _generate_completion_stream(self, adapted_request: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        events = super()._generate_completion_stream(adapted_request, request, raw_request)
        return sglext.end_with_reply(events, Exchange.of(raw_request).replies, "text_completion", request)


def _place(request: Any, exchange: Exchange) -> None:
    asked = exchange.asked
    exchange.give_options(request)
    if asked.passages:
        if not isinstance(request.prompt, str):
            raise request_error(f"{asked.path}.chunks", "the prompt is not one text", "send one prompt, as text")
        if asked.options and asked.options.get("spans"):
            raise request_error(f"{asked.path}.chunks", "spans are given too", "mark chunks in one of the two ways")
        request.prompt = exchange.tag_passages(asked.passages) + request.prompt


def _without_marks(prompt: Any, exchange: Exchange, args: ChunkCacheArgs) -> Any:
    """A prompt as it is echoed: text without marks, token ids as they are."""
    if isinstance(prompt, list):
        return [_without_marks(one, exchange, args) for one in prompt] if isinstance(prompt[0], str) else prompt
    marked = split_marked(prompt, args.separator, COMPLETION_NAMES.text)
    return exchange.marks.without(prompt if marked is None else marked.text)
