"""`/v1/completions`: marks in prompts. The echo of a prompt has no separators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from sglang_chunk_cache.api.marks import split_marked
from sglang_chunk_cache.api.prepare import COMPLETION_NAMES, prepare
from sglang_chunk_cache.host import sglext
from sglang_chunk_cache.host.generate import misplaced_options
from sglang_chunk_cache.server_args import ChunkCacheArgs, attached


class ChunkServingCompletion(OpenAIServingCompletion):
    """See the head of this file."""

    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        error = await misplaced_options(self, raw_request)
        return await super().handle_request(request, raw_request) if error is None else error

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        adapted, request = super()._convert_to_internal_request(request, raw_request)
        args = attached(self.tokenizer_manager.server_args)
        if args is not None:
            prepare(adapted, self.tokenizer_manager, args, COMPLETION_NAMES)
            if request.echo:
                request.prompt = _without_separators(request.prompt, args)
        return adapted, request

    def _build_completion_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        return sglext.add_reply(super()._build_completion_response(request, ret, created), ret)

    def _generate_completion_stream(self, adapted_request: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        events = super()._generate_completion_stream(adapted_request, request, raw_request)
        return sglext.end_with_reply(events, adapted_request, "text_completion", request.model)


def _without_separators(prompt: Any, args: ChunkCacheArgs) -> Any:
    """A prompt for the echo; token ids stay as they are."""
    if isinstance(prompt, list):
        return [_without_separators(one, args) for one in prompt] if isinstance(prompt[0], str) else prompt
    marked = split_marked(prompt, args.separator, COMPLETION_NAMES.text)
    return prompt if marked is None else marked.text
