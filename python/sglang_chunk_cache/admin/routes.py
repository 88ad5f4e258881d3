"""The routes `/chunk_cache/...` of SGLang's HTTP server.

Verb: `add_routes`, called in the launching process where the chunk cache is on. Promises: JSON in and out; a user's
mistake is a 400 that names the JSON path and the remedy, "not now" a 409, an unknown key a 404; who may ask is decided
by SGLang, as for its own `/flush_cache` (`--api-key`, `--admin-api-key`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from chunk_cache.errors import ChunkCacheRequestError, user_error
from sglang_chunk_cache.admin import body
from sglang_chunk_cache.admin.client import Admin, AdminRefused, admin_of

PREFIX = "/chunk_cache"

T = TypeVar("T")
Answer: TypeAlias = Callable[[Admin, Request], Awaitable[Response | dict[str, Any]]]
Route: TypeAlias = tuple[str, str, Callable[[Request], Awaitable[Response]]]
"""Method, path, endpoint."""


def _admin() -> Admin:
    from sglang.srt.entrypoints.http_server import get_global_state

    return admin_of(get_global_state().tokenizer_manager)


async def _json(request: Request) -> Any:
    """The decoded body; an empty one is an empty object."""
    try:
        return await request.json() if await request.body() else {}
    except ValueError as error:
        problem = f"not JSON ({str(error).splitlines()[0]})"
        raise user_error(ChunkCacheRequestError, "body", problem, "send a JSON object") from None


async def _reply(answer: Answer, request: Request) -> Response:
    try:
        result = await answer(_admin(), request)
    except AdminRefused as error:
        return JSONResponse({"error": {"message": str(error), **error.details}}, status_code=error.status)
    except ChunkCacheRequestError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    return result if isinstance(result, Response) else JSONResponse(result)


def _route(method: str, name: str, answer: Answer) -> Route:
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def endpoint(request: Request) -> Response:
        return await _reply(answer, request)

    path = f"{PREFIX}/{name}"
    endpoint.__name__, endpoint.__doc__ = name, f"{method} {path}"  # FastAPI describes it by them
    return method, path, endpoint


def _with_body(parse: Callable[[Any], T], act: Callable[[Admin, T], Awaitable[dict[str, Any]]]) -> Answer:
    """`act` on what `parse` makes of the request's body."""

    async def answer(admin: Admin, request: Request) -> dict[str, Any]:
        return await act(admin, parse(await _json(request)))

    return answer


async def _stats(admin: Admin, _request: Request) -> dict[str, Any]:
    return await admin.stats()


async def _variants(admin: Admin, request: Request) -> dict[str, Any]:
    return await admin.variants(body.parse_listing(request.query_params))


async def _warm(admin: Admin, request: Request) -> Response:
    lines = admin.warm(body.parse_warm(await _json(request)), request)
    return StreamingResponse(_json_lines(lines), media_type="application/x-ndjson")


async def _json_lines(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"
    except AdminRefused as error:  # the status is sent already
        yield json.dumps({"error": {"message": str(error)}}).encode() + b"\n"


ROUTES: tuple[Route, ...] = (
    _route("GET", "stats", _stats),
    _route("GET", "variants", _variants),
    _route("POST", "pin", _with_body(body.parse_pin, Admin.pin)),
    _route("POST", "unpin", _with_body(body.parse_unpin, Admin.unpin)),
    _route("POST", "evict", _with_body(body.parse_selection, Admin.evict)),
    _route("POST", "flush", _with_body(body.parse_flush, Admin.flush)),
    _route("POST", "warm", _warm),
)


def add_routes() -> None:
    """Adds the routes to SGLang's app, once."""
    from sglang.srt.entrypoints.http_server import app

    known = {getattr(route, "path", None) for route in app.router.routes}
    for method, path, endpoint in ROUTES:
        if path not in known:
            app.add_api_route(path, endpoint, methods=[method], include_in_schema=True)
