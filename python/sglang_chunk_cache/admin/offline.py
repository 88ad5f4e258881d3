"""EngineAdmin: the administration of an Engine, without HTTP.

Takes the bodies of the routes as keyword arguments, returns their replies, and raises `ValueError` where a route would
answer with an error. A pin ends while the engine works (during `generate`, or another call), not between two calls.
"""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.admin import admin_bodies as body
from sglang_chunk_cache.admin.administration import Admin
from sglang_chunk_cache.admin.warming import warm


class EngineAdmin:
    """See the head of this file.

    Example:
        >>> llm = engine(model_path="models/llama")
        >>> EngineAdmin(llm).warm(texts=["Paris is in France."])["stored"]
        1
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._admin: Admin = engine.tokenizer_manager.chunk_cache_admin

    def stats(self) -> dict[str, Any]:
        """GET /chunk_cache/stats"""
        return self._run(self._admin.stats())

    def requests(self) -> dict[str, Any]:
        """GET /chunk_cache/requests"""
        return self._run(self._admin.requests())

    def variants(self, **query: Any) -> dict[str, Any]:
        """GET /chunk_cache/variants"""
        listing = body.parse_listing({name: str(value) for name, value in query.items()})
        return self._run(self._admin.variants(listing))

    def pin(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/pin"""
        return self._run(self._admin.pin(body.parse_pin(fields)))

    def unpin(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/unpin"""
        return self._run(self._admin.unpin(body.parse_unpin(fields)))

    def evict(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/evict"""
        return self._run(self._admin.evict(body.parse_evict(fields)))

    def flush(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/flush"""
        return self._run(self._admin.flush(body.parse_flush(fields)))

    def warm(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/warm; only the summary."""

        async def last_line() -> dict[str, Any]:
            lines = [line async for line in await warm(self._admin, body.parse_warm(fields))]
            return lines[-1]

        return self._run(last_line())

    def _run(self, coroutine: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._engine.loop.run_until_complete(coroutine)
        return result
