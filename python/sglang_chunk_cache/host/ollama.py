"""`/api/chat` and `/api/generate`, the routes of Ollama: they cannot mark chunks, and say so.

SGLang turns their texts into token ids before anything of ours sees them, so separators would reach the model as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from chunk_cache.errors import request_error
from sglang_chunk_cache.flags.server_args import attached

_REMEDY = "use /v1/chat/completions or /v1/completions, or remove the separators"


class ChunkOllamaServing(OllamaServing):
    """See the head of this file."""

    async def handle_chat(self, request: Any, raw_request: Any) -> Any:
        self._check_unmarked(request)
        return await super().handle_chat(request, raw_request)

    async def handle_generate(self, request: Any, raw_request: Any) -> Any:
        self._check_unmarked(request)
        return await super().handle_generate(request, raw_request)

    def _check_unmarked(self, request: Any) -> None:
        args = attached(self.tokenizer_manager.server_args)
        for path, text in _texts(request):
            if args is not None and args.separator in text:
                error = request_error(path, f"this route cannot mark chunks with {args.separator!r}", _REMEDY)
                raise HTTPException(HTTPStatus.BAD_REQUEST, str(error))


def _texts(request: Any) -> Iterator[tuple[str, str]]:
    for i, message in enumerate(getattr(request, "messages", ())):
        yield f"messages[{i}].content", message.content
    for name in ("prompt", "system"):
        yield name, getattr(request, name, None) or ""
