"""Exchange: one HTTP request and its response, as far as the chunk cache is concerned.

It lies in the ASGI scope, where everything that handles the request finds it: it gets what the body asks for when that
is read, the marks while the request is prepared, and the replies as they come; `ReplyHeaders` makes the response's
headers from it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.prompt.chunk_cache_fields import KEY
from chunk_cache.prompt.marked_body import MarkedBody
from sglang_chunk_cache.api.replies import Replies

HEADER, UNUSED_HEADER = "x-chunk-cache", "x-chunk-cache-unused"
_MAX_NAMED = 8
"""Most marks that a header names: proxies limit its length."""


@dataclass
class Exchange(MarkedBody):
    """See the head of this file.

    Attributes:
        replies: the replies of its choices.
        awaits_reply: whether the scheduler will send replies, so that the headers wait for the first output.
    """

    replies: Replies = field(default_factory=Replies)
    awaits_reply: bool = False

    @classmethod
    def of(cls, raw_request: Any) -> Exchange:
        """The exchange of a request of Starlette; a new one where there is no request."""
        if raw_request is None:
            return cls()
        return raw_request.scope.setdefault(KEY, cls())

    def give_options(self, request: Any) -> None:
        """Puts the options into the `custom_params` of a request of OpenAI's, wherever they stood in its body; and the
        tenant, where SGLang has dropped it."""
        for name, value in self.tenant.items():
            setattr(request, name, value)
        if self.asked.options is not None:
            request.custom_params = {**(request.custom_params or {}), KEY: self.asked.options}

    async def noting(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The outputs of a request, their replies noted."""
        async for out in outputs:
            for index, one in enumerate(out if isinstance(out, list) else [out]):
                self.replies.note(one.get("index", index), one["meta_info"])
            yield out

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response."""
        unused = self.marks.unused
        named = [f"{path} ({reason})" for path, reason in unused.items()][:_MAX_NAMED]
        more = [f"and {len(unused) - _MAX_NAMED} more"] if len(unused) > _MAX_NAMED else []
        found = {HEADER: self.replies.header(), UNUSED_HEADER: ", ".join(named + more)}
        return [(name.encode(), value.encode()) for name, value in found.items() if value]


class ReplyHeaders:
    """ASGI middleware: adds the headers of the exchange to a response.

    If replies are awaited, the head of the response is held back until the first piece of its body, which comes with
    the first output.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: dict[str, Any] | None = None

        async def send_with_headers(message: dict[str, Any]) -> None:
            nonlocal held
            exchange = scope.get(KEY)
            if message["type"] == "http.response.start" and exchange is not None:
                held = message
                if exchange.awaits_reply:
                    return
            if held is not None and exchange is not None:
                start, held = held, None
                await send({**start, "headers": [*start.get("headers", ()), *exchange.headers()]})
                if start is message:
                    return
            await send(message)

        await self._app(scope, receive, send_with_headers)
