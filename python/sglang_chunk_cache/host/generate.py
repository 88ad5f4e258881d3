"""Bad requests that are refused before the answer starts.

Verbs: `generate_contract_error`, `misplaced_options` (a field that SGLang would drop unseen, on `/generate` and on the
OpenAI routes), `serve_generate_request` (marks and options).
A stream sends its status 200 before SGLang looks at the request itself, so everything that can be wrong with marks and
options is looked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from chunk_cache.errors import ChunkCacheRequestError
from sglang_chunk_cache.api.prepare import prepare
from sglang_chunk_cache.server_args import attached


def top_level_error(body: Any, remedy: str = "sampling_params.custom_params.chunk_cache") -> str | None:
    """The message for a `chunk_cache` field at the top of a body, or None."""
    if isinstance(body, Mapping) and "chunk_cache" in body:
        return f"chunk_cache: unknown field at the top of the request; put it into {remedy}"
    return None


def misplaced_error(body: Any, outer: str | None, inner: str, remedy: str) -> str | None:
    """The message for options that stand where another route reads them, and this one would drop them; or None.

    Args:
        outer, inner: names of the fields around `chunk_cache`; None = no outer one.
    """
    holder = body if outer is None else body.get(outer) if isinstance(body, Mapping) else None
    found = holder.get(inner) if isinstance(holder, Mapping) else None
    if not isinstance(found, Mapping) or "chunk_cache" not in found:
        return None
    path = ".".join(name for name in (outer, inner, "chunk_cache") if name)
    return f"{path}: this route does not read it there; put it into {remedy}"


def generate_contract_error(original: Callable[[Any], str | None], body: Any) -> str | None:
    """AROUND `api_contract.generate_contract_error`."""
    remedy = "sampling_params.custom_params.chunk_cache"
    return top_level_error(body) or misplaced_error(body, None, "custom_params", remedy) or original(body)


async def misplaced_options(serving: Any, raw_request: Any) -> Any:
    """The error response of an OpenAI route for options at a place that it does not read, or None.

    SGLang decoded the body before, and the request keeps it.
    """
    if raw_request is None or attached(serving.tokenizer_manager.server_args) is None:
        return None
    body, remedy = await raw_request.json(), "custom_params.chunk_cache"
    error = top_level_error(body, remedy) or misplaced_error(body, "sampling_params", "custom_params", remedy)
    return None if error is None else serving.create_error_response(error)


async def serve_generate_request(original: Callable[..., Any], obj: Any, request: Any) -> Any:
    """AROUND `http_server.serve_generate_request`, which knows the request and has sent nothing yet."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    args = attached(manager.server_args)
    if args is not None:
        try:
            prepare(obj, manager, args)
        except ChunkCacheRequestError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    return await original(obj, request)
