"""Adds the routes `/chunk_cache/...` and the headers of replies to SGLang's HTTP server (`add_routes`).

Who may ask is decided by SGLang, as for its own `/flush_cache` (`--api-key`, `--admin-api-key`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from sglang.srt.entrypoints.http_server import app, get_global_state
from sglang.srt.utils.auth import AuthDecision, AuthLevel, auth_level

from sglang_chunk_cache.admin.routes import PREFIX, ROUTES, Route, reply
from sglang_chunk_cache.api.exchange import ReplyHeaders


def add_routes(to: FastAPI = app) -> None:
    """Adds the routes to SGLang's app, and the headers of replies to its responses, once."""
    known = {getattr(route, "path", None) for route in to.router.routes}
    for route in ROUTES:
        if route[1] not in known:
            _add(to, route)
    if not any(middleware.cls is ReplyHeaders for middleware in to.user_middleware):
        to.add_middleware(ReplyHeaders)


def decide_request_auth(
    original: Callable[..., AuthDecision], *, method: str, path: str, **kwargs: Any
) -> AuthDecision:
    """AROUND SGLang's: anybody may open the page; the routes that give it data still ask for the key."""
    if method in ("GET", "HEAD") and path in (PREFIX, f"{PREFIX}/"):  # the latter is redirected
        return AuthDecision(allowed=True)
    return original(method=method, path=path, **kwargs)


def _add(to: FastAPI, route: Route) -> None:
    method, path, answer = route

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def endpoint(request: Request) -> Response:
        return await reply(answer, get_global_state().tokenizer_manager.chunk_cache_admin, request)

    # FastAPI describes a route by the name and docstring of its function.
    endpoint.__name__, endpoint.__doc__ = path.rpartition("/")[2], f"{method} {path}"
    is_page = path == PREFIX
    to.add_api_route(path, endpoint, methods=[method, *(["HEAD"] if is_page else [])], include_in_schema=not is_page)
