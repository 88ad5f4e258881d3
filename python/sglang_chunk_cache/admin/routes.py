"""The routes `/chunk_cache/...`: ROUTES, from a request to `Admin` and back.

Promises: JSON in and out; a user's mistake is a 400 that names the JSON path and the remedy, "not now" a 409, an
unknown key a 404. `host/admin_routes.py` adds them to SGLang's HTTP server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from chunk_cache.errors import ChunkCacheRequestError, request_error
from sglang_chunk_cache.admin import admin_bodies as body
from sglang_chunk_cache.admin.admin_page import page
from sglang_chunk_cache.admin.administration import Admin, AdminRefused
from sglang_chunk_cache.admin.warming import warm

PREFIX = "/chunk_cache"

T = TypeVar("T")
Answer: TypeAlias = Callable[[Admin, Request], Awaitable[Response | dict[str, Any]]]
Route: TypeAlias = tuple[str, str, Answer]
"""Method, path, what answers."""


async def _json(request: Request) -> Any:
    """The decoded body; an empty one is an empty object."""
    try:
        return await request.json() if await request.body() else {}
    except (ValueError, RecursionError) as error:
        problem = f"not JSON ({str(error).splitlines()[0]})"
        raise request_error("body", problem, "send a JSON object") from None


async def reply(answer: Answer, admin: Admin, request: Request) -> Response:
    """What the client gets."""
    try:
        result = await answer(admin, request)
    except AdminRefused as error:
        return JSONResponse({"error": {"message": str(error), **error.details}}, status_code=error.status)
    except ChunkCacheRequestError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    return result if isinstance(result, Response) else JSONResponse(result)


def _with_body(parse: Callable[[Any], T], act: Callable[[Admin, T], Awaitable[dict[str, Any]]]) -> Answer:
    """`act` on what `parse` makes of the request's body."""

    async def answer(admin: Admin, request: Request) -> dict[str, Any]:
        return await act(admin, parse(await _json(request)))

    answer.__doc__ = act.__doc__
    return answer


async def _page(_admin: Admin, _request: Request) -> Response:
    """A page for people; it shows what the routes below it tell."""
    html, policy = page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})


async def _stats(admin: Admin, _request: Request) -> dict[str, Any]:
    """Options and numbers of every scheduler process."""
    return await admin.stats()


async def _requests(admin: Admin, _request: Request) -> dict[str, Any]:
    """What became of the latest requests, and sums of each minute."""
    return await admin.requests()


async def _variants(admin: Admin, request: Request) -> dict[str, Any]:
    """The stored variants, by id or by uses, or those of one chunk."""
    return await admin.variants(body.parse_listing(request.query_params))


async def _warm(admin: Admin, request: Request) -> Response:
    """Computes chunks ahead of time, each behind filler, behind its neighbours, or alone."""
    lines = await warm(admin, body.parse_warm(await _json(request)), request)
    return StreamingResponse(_json_lines(lines), media_type="application/x-ndjson")


async def _json_lines(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"
    except AdminRefused as error:  # the status is sent already
        yield json.dumps({"error": {"message": str(error)}}).encode() + b"\n"


ROUTES: tuple[Route, ...] = (
    ("GET", PREFIX, _page),
    ("GET", f"{PREFIX}/stats", _stats),
    ("GET", f"{PREFIX}/requests", _requests),
    ("GET", f"{PREFIX}/variants", _variants),
    ("POST", f"{PREFIX}/pin", _with_body(body.parse_pin, Admin.pin)),
    ("POST", f"{PREFIX}/unpin", _with_body(body.parse_unpin, Admin.unpin)),
    ("POST", f"{PREFIX}/evict", _with_body(body.parse_evict, Admin.evict)),
    ("POST", f"{PREFIX}/flush", _with_body(body.parse_flush, Admin.flush)),
    ("POST", f"{PREFIX}/warm", _warm),
)
