"""`/api/chat` and `/api/generate`, the routes of Ollama: they cannot mark chunks, and say so.

SGLang turns their texts into token ids before anything of ours sees them, so separators would reach the model as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from sglang_chunk_cache import server_args as options


async def handle(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """AROUND `OllamaServing.handle_chat` and `OllamaServing.handle_generate`.

    Raises:
        HTTPException: a text has the separator; status 400.
    """
    args = options.attached(serving.tokenizer_manager.server_args)
    if args is not None:
        for path, text in _texts(request):
            if args.separator in text:
                problem = f"{path}: this route cannot mark chunks with {args.separator!r}"
                remedy = "use /v1/chat/completions or /v1/completions, or remove the separators"
                raise HTTPException(HTTPStatus.BAD_REQUEST, f"{problem}; {remedy}")
    return await original(serving, request, raw_request)


def _texts(request: Any) -> Iterator[tuple[str, str]]:
    for i, message in enumerate(getattr(request, "messages", ())):
        yield f"messages[{i}].content", message.content
    for name in ("prompt", "system"):
        yield name, getattr(request, name, None) or ""
