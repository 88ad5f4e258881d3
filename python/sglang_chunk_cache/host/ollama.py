"""`/api/chat` and `/api/generate`: a bad request is a 400 in Ollama's form, before the answer starts.

Stock SGLang answers it with a 500, and with `stream` it has sent its status 200 by then. Chunks cannot be marked here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from chunk_cache.errors import one_line, request_error, show
from sglang_chunk_cache.api.stock_checks import sampling_problem


class ChunkOllamaServing(OllamaServing):
    async def handle_chat(self, request: Any, raw_request: Any) -> Any:
        return await _checked(super().handle_chat(request, raw_request))

    async def handle_generate(self, request: Any, raw_request: Any) -> Any:
        return await _checked(super().handle_generate(request, raw_request))

    def _convert_options_to_sampling_params(self, options: dict[str, Any] | None = None) -> Any:
        """Checks the options under the names that the client gave them."""
        for name, value in (options or {}).items():
            one = super()._convert_options_to_sampling_params({name: value})
            problem = sampling_problem(one, self.tokenizer_manager)
            if problem is not None:
                problem = f"{show(value)} cannot be used: {problem}"
                raise request_error(f"options.{name}", problem, "correct it, or leave it out")
        return super()._convert_options_to_sampling_params(options)


async def _checked(answer: Awaitable[Any]) -> Any:
    """An answer, of a stream only once it has its first piece; a 400 where the request is refused until then."""
    try:
        response = await answer
        if isinstance(response, StreamingResponse):
            pieces = aiter(response.body_iterator)
            response.body_iterator = _from(await anext(pieces), pieces)
        return response
    except (ValueError, TemplateError) as error:
        return JSONResponse({"error": one_line(error)}, status_code=HTTPStatus.BAD_REQUEST)


async def _from(first: Any, others: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for one in others:
        yield one
