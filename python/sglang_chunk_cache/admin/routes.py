"""The routes `/chunk_cache/...` of SGLang's HTTP server.

Verb: `add_routes`, called in the launching process where the chunk cache is on. Promises: JSON in and out; a user's
mistake is a 400 that names the JSON path and the remedy, "not now" a 409, an unknown key a 404; who may ask is decided
by SGLang, as for its own `/flush_cache` (`--api-key`, `--admin-api-key`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from chunk_cache.errors import ChunkCacheRequestError, user_error
from sglang_chunk_cache.admin import body
from sglang_chunk_cache.admin.client import Admin, AdminRefused, admin_of

PREFIX = "/chunk_cache"


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


async def _reply(handle: Callable[[], Awaitable[Response | dict[str, Any]]]) -> Response:
    try:
        result = await handle()
    except AdminRefused as error:
        return JSONResponse({"error": {"message": str(error), **error.details}}, status_code=error.status)
    except ChunkCacheRequestError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    return result if isinstance(result, Response) else JSONResponse(result)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def stats(request: Request) -> Response:
    """GET /chunk_cache/stats"""
    return await _reply(_admin().stats)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def variants(request: Request) -> Response:
    """GET /chunk_cache/variants"""

    async def handle() -> dict[str, Any]:
        return await _admin().variants(body.parse_listing(request.query_params))

    return await _reply(handle)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def pin(request: Request) -> Response:
    """POST /chunk_cache/pin"""

    async def handle() -> dict[str, Any]:
        return await _admin().pin(body.parse_pin(await _json(request)))

    return await _reply(handle)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def unpin(request: Request) -> Response:
    """POST /chunk_cache/unpin"""

    async def handle() -> dict[str, Any]:
        return await _admin().unpin(body.parse_unpin(await _json(request)))

    return await _reply(handle)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def evict(request: Request) -> Response:
    """POST /chunk_cache/evict"""

    async def handle() -> dict[str, Any]:
        return await _admin().evict(body.parse_selection(await _json(request)))

    return await _reply(handle)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def flush(request: Request) -> Response:
    """POST /chunk_cache/flush"""

    async def handle() -> dict[str, Any]:
        return await _admin().flush(body.parse_flush(await _json(request)))

    return await _reply(handle)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def warm(request: Request) -> Response:
    """POST /chunk_cache/warm"""

    async def handle() -> Response:
        lines = _admin().warm(body.parse_warm(await _json(request)), request)
        return StreamingResponse(_json_lines(lines), media_type="application/x-ndjson")

    return await _reply(handle)


async def _json_lines(lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"
    except AdminRefused as error:  # the status is sent already
        yield json.dumps({"error": {"message": str(error)}}).encode() + b"\n"


ROUTES: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
    ("GET", f"{PREFIX}/stats", stats),
    ("GET", f"{PREFIX}/variants", variants),
    ("POST", f"{PREFIX}/pin", pin),
    ("POST", f"{PREFIX}/unpin", unpin),
    ("POST", f"{PREFIX}/evict", evict),
    ("POST", f"{PREFIX}/flush", flush),
    ("POST", f"{PREFIX}/warm", warm),
)


def add_routes() -> None:
    """Adds the routes to SGLang's app, once."""
    from sglang.srt.entrypoints.http_server import app

    known = {getattr(route, "path", None) for route in app.router.routes}
    for method, path, endpoint in ROUTES:
        if path not in known:
            app.add_api_route(path, endpoint, methods=[method], include_in_schema=True)
