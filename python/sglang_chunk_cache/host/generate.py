"""Bad requests that are refused before the answer starts.

Verbs: `read_json` (what every JSON route is sent), `serve_generate_request` (marks and options of `/generate`).
A stream sends its status 200 before SGLang looks at the request itself, so everything that can be wrong with marks and
options is looked for here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.prompt.marked_body import MarkFlags, read_body
from sglang_chunk_cache.api.exchange import Exchange
from sglang_chunk_cache.api.prepare import may_get_reply, prepare
from sglang_chunk_cache.api.stock_checks import check_body, check_vertex
from sglang_chunk_cache.flags.server_args import attached, get_args

VERTEX = "/vertex_generate"
_RENAMED = {
    "AIP_PREDICT_ROUTE": VERTEX,
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
}
"""Routes to which the environment may give another name, by variable."""


async def read_json(original: Callable[[Any], Any], request: Any) -> Any:
    """AROUND `ORJSONRequest.json`, which FastAPI calls once for each request, and before it parses the body."""
    is_read = hasattr(request, "_json")
    body, args = await original(request), get_args()
    if not is_read and args is not None:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        path = next((route for name, route in _RENAMED.items() if path == os.environ.get(name)), path)
        try:
            check_body(body)
            read_body(path, body, Exchange.of(request), MarkFlags(args.separator, args.marks, args.parts))
            if path == VERTEX:
                check_vertex(body)
        except ChunkCacheRequestError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    return body


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
        Exchange.of(request).awaits_reply = may_get_reply(obj, args)
    return await original(obj, request)
