"""The routes `/chunk_cache/...`: ROUTES, from a request to `Admin` and back.

Promises: JSON in and out; a user's mistake is a 400 that names the JSON path and the remedy, "not now" a 409, an
unknown key a 404. `host/admin_routes.py` adds them to SGLang's HTTP server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.options.admin_bodies import parse_warm
from sglang_chunk_cache.admin.admin_page import page
from sglang_chunk_cache.admin.administration import ROUTED, Admin, AdminRefused, Routed
from sglang_chunk_cache.admin.warming import warm

PREFIX = "/chunk_cache"

Answer: TypeAlias = Callable[[Admin, Request], Awaitable[Response | dict[str, Any]]]
Route: TypeAlias = tuple[str, str, Answer]
"""Method, path, function that answers."""


async def _json(request: Request) -> Any:
    """The decoded body; an empty one is an empty object."""
    try:
        return await request.json() if await request.body() else {}
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({str(error).splitlines()[0]})"
        raise request_error("body", problem, "send a JSON object") from None


async def reply(answer: Answer, admin: Admin, request: Request) -> Response:
    """The response to a client: the answer, or the error as JSON."""
    try:
        result = await answer(admin, request)
    except AdminRefused as error:
        return JSONResponse({"error": {"message": str(error), **error.details}}, status_code=error.status)
    except ChunkCacheRequestError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    return result if isinstance(result, Response) else JSONResponse(result)


def _answer(routed: Routed) -> Answer:
    """The route's answer: calls a verb of `Admin` with the request's body, or the query of a GET."""

    async def answer(admin: Admin, request: Request) -> dict[str, Any]:
        given = request.query_params if routed.method == "GET" else await _json(request)
        return await routed.answer(admin, given)

    answer.__doc__ = routed.act.__doc__
    return answer


async def _page(_admin: Admin, _request: Request) -> Response:
    """A page for people; it shows what the routes below it tell."""
    html, policy = page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})


async def _warm(admin: Admin, request: Request) -> Response:
    """Computes chunks ahead of time, each behind filler, behind its neighbours, or alone."""
    chat = getattr(request.app.state, "openai_serving_chat", None)
    lines = await warm(admin, parse_warm(await _json(request)), request, chat)
    return StreamingResponse(_json_lines(lines), media_type="application/x-ndjson")


async def _json_lines(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"
    except AdminRefused as error:  # the status is sent already
        yield json.dumps({"error": {"message": str(error)}}).encode() + b"\n"


ROUTES: tuple[Route, ...] = (
    ("GET", PREFIX, _page),
    *((routed.method, f"{PREFIX}/{name}", _answer(routed)) for name, routed in ROUTED.items()),
    ("POST", f"{PREFIX}/warm", _warm),
)
