"""Client: the requests that an explanation needs, sent to a running server.

Verbs: `tokenizer_path` (of the server's model), `prime` (each chunk behind the text before the first one, so that it
is in the store), `explain` (the whole prompt under one method). Promise: whatever the server or the network answers
becomes one sentence that names the flag and the remedy.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from types import TracebackType
from typing import Any

import httpx

from chunk_cache.errors import ChunkCacheRequestError, user_error
from sglang_chunk_cache.api.marks import MarkedText
from sglang_chunk_cache.explain.specs import MethodSpec

TIMEOUT_S = 600.0  # a long prompt on a CPU
_START = "start one with `python -m sglang.launch_server --model-path DIR --chunk-cache`"
_KEY = "chunk_cache"


class Client:
    """A context manager around one connection."""

    def __init__(self, url: str, separator: str, extra_key: str | None = None, api_key: str | None = None) -> None:
        """Sends nothing yet.

        Args:
            url: of the server, without a path.
            separator: that marks chunks on this server.
            extra_key: partition of the cache for all requests; None = that of requests without one.
            api_key: of the server, where it has one.

        Raises:
            ChunkCacheRequestError: the URL is malformed.
        """
        self._url = url
        self._where = f"--url {url}"
        self._separator = separator
        self._extra_key = extra_key
        try:
            self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        except httpx.InvalidURL as error:
            raise self._error(f"not a URL ({error})", "give one such as http://127.0.0.1:30000") from None
        if api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def tokenizer_path(self) -> str:
        """Where the server has its tokenizer from: a folder on its machine, or a name.

        Raises:
            ChunkCacheRequestError: no server answers, or it is not SGLang.
        """
        info = self._send("GET", "/model_info")
        path = info.get("tokenizer_path") or info.get("model_path")
        if not path:
            raise self._error("the server does not name its tokenizer", "name it with --model-path")
        return str(path)

    def prime(self, marked: MarkedText) -> None:
        """Has every chunk computed, once each, behind the text before the first one.

        Raises:
            ChunkCacheRequestError: the server refuses.
        """
        for chunk in dict.fromkeys(marked.chunks):
            self._generate((marked.pieces[0], chunk, ""), {"mode": "auto"}, 0)

    def explain(self, marked: MarkedText, spec: MethodSpec, max_new_tokens: int) -> dict[str, Any]:
        """The reply of `/generate` to the whole prompt.

        Raises:
            ChunkCacheRequestError: the server refuses, for example the method or an option of it.
        """
        return self._generate(marked.pieces, spec.params(), max_new_tokens)

    def _generate(self, pieces: tuple[str, ...], params: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "text": self._separator.join(pieces),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "custom_params": {_KEY: params},
            },
        }
        if self._extra_key is not None:
            body["extra_key"] = self._extra_key
        reply = self._send("POST", "/generate", body)
        found = reply.get("meta_info", {}).get(_KEY)
        if found is None:
            raise self._error("the server runs without --chunk-cache", _START)
        if len(found["chunks"]) != len(pieces) - 2:
            problem = f"the server found {len(found['chunks'])} chunks instead of {len(pieces) - 2}"
            raise user_error(
                ChunkCacheRequestError, "--separator", problem, "name the server's --chunk-cache-separator"
            )
        return reply

    def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.UnsupportedProtocol:
            raise self._error("the address has no http://", "give one such as http://127.0.0.1:30000") from None
        except httpx.TimeoutException:
            raise self._error(f"no answer within {TIMEOUT_S:.0f} s", "look into the server's log") from None
        except httpx.TransportError as error:
            raise self._error(f"no server answers ({error})", f"{_START}, or name its address") from None
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise user_error(
                ChunkCacheRequestError, "--api-key", f"{self._url} does not accept it", "give the server's API key"
            )
        if response.is_error:
            problem = f"{path} was answered with {response.status_code} ({_message(response)})"
            raise self._error(problem, "change what the message names")
        try:
            reply = response.json()
        except json.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            raise self._error(f"{path} was not answered with a JSON object", "name the address of an SGLang server")
        return reply

    def _error(self, problem: str, remedy: str) -> ChunkCacheRequestError:
        return user_error(ChunkCacheRequestError, self._where, problem, remedy)


def _message(response: httpx.Response) -> str:
    """The sentence of an error reply, whatever object of SGLang's routes it stands in."""
    try:
        value = response.json()
    except json.JSONDecodeError:
        value = response.text
    while isinstance(value, dict):
        value = value.get("error") or value.get("message") or value.get("detail") or json.dumps(value)
    return " ".join(str(value).split())[:400] or response.reason_phrase
