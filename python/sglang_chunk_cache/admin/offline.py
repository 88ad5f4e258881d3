"""EngineAdmin: the administration of an Engine, without HTTP.

It has a method for each route of `ROUTED`, and `warm`: they take the body as keyword arguments, return the reply, and
raise `ValueError` where the route would answer with an error. A pin ends while the engine works (during `generate`, or
another call), not between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunk_cache.errors import given
from chunk_cache.options.admin_bodies import parse_warm
from sglang_chunk_cache.admin.administration import ROUTED, Admin, Routed
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

    def warm(self, **fields: Any) -> dict[str, Any]:
        """POST /chunk_cache/warm; only the summary."""

        async def last_line() -> dict[str, Any]:
            body, manager, chat = parse_warm(fields), self._admin.manager, None
            if body.messages is not None:
                chat = manager.serving_chat_class(manager, self._engine.template_manager)
            lines = [line async for line in await warm(self._admin, body, chat=chat)]
            return lines[-1]

        return self._run(last_line())

    def _run(self, coroutine: Any) -> dict[str, Any]:
        return self._engine.loop.run_until_complete(coroutine)


def _method(name: str, routed: Routed) -> Callable[..., dict[str, Any]]:
    """The route as a method of `EngineAdmin`."""

    def call(self: EngineAdmin, **fields: Any) -> dict[str, Any]:
        if routed.method == "GET":  # a query holds texts
            fields = {key: str(value) for key, value in given(fields).items()}
        return self._run(routed.answer(self._admin, fields))

    call.__name__, call.__doc__ = name, routed.act.__doc__
    return call


for _name, _routed in ROUTED.items():
    setattr(EngineAdmin, _name, _method(_name, _routed))
