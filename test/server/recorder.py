"""Recorder: stands between a program and a server, and keeps what the program asked and the server replied.

A context manager with a `url` of its own; what it is asked it asks the server. `asked` holds path and body of what was
asked of routes that generate, `replies` the JSON objects that came back, in the order in which they were complete.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

_GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages")
_OF_THE_CONNECTION = (
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "accept-encoding",
    "content-encoding",
)


class Recorder:
    """See the head of this file.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.replies: list[dict[str, Any]] = []
        self._client = httpx.Client(base_url=url, timeout=300)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._client.close()

    @property
    def answers(self) -> list[str]:
        """The texts of the replies that have one."""
        found = (reply["text"] if "text" in reply else _message(reply).get("content") for reply in self.replies)
        return [text for text in found if text]

    def total(self, kind: str) -> int:
        """Tokens of a kind, `reused` or `recomputed`, of all replies together."""
        return sum(_chunk_cache(reply).get(f"{kind}_tokens", 0) for reply in self.replies)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        def forward(handler: BaseHTTPRequestHandler) -> None:
            body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
            headers = {name: value for name, value in handler.headers.items() if _passes(name)}
            response = self._client.request(handler.command, handler.path, content=body, headers=headers)
            if handler.path in _GENERATING:
                self.asked.append((handler.path, json.loads(body)))
                if response.headers["content-type"].startswith("application/json"):
                    found = json.loads(response.content)
                    self.replies += found if isinstance(found, list) else [found]
            handler.send_response(response.status_code)
            for name, value in response.headers.items():
                if _passes(name):
                    handler.send_header(name, value)
            handler.send_header("content-length", str(len(response.content)))
            handler.end_headers()
            handler.wfile.write(response.content)

        methods = {"do_GET": forward, "do_POST": forward, "log_message": lambda *_: None}
        return type("Handler", (BaseHTTPRequestHandler,), methods)


def _passes(name: str) -> bool:
    return name.lower() not in _OF_THE_CONNECTION


def _message(reply: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][0]["message"]
    return found


def _chunk_cache(reply: dict[str, Any]) -> dict[str, Any]:
    holder = reply.get("meta_info") or reply.get("sglext") or {}
    found: dict[str, Any] = holder.get("chunk_cache") or {}
    return found
