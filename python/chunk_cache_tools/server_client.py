"""ServerClient: sends the requests of commands and benchmarks to a running server.

Verbs: `send` (returns the whole response), `ask` (returns its JSON object), `look` (gets a page that may not exist),
`lines` (returns a response line by line), `flush` (empties the server's caches), `tokenizer_path` (of its model);
`one_replica` (keeps requests on one replica); `secret_digest` and `without_user` (for files and messages).
Promises: an error that the user can fix is a `ServerRefused`, whose sentence names the flag and the remedy; an error
that may pass, because the server is being restarted, is a `ServerGone`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

from chunk_cache.errors import ChunkCacheRequestError, user_error

KEY_ENV = "CHUNK_CACHE_API_KEY"
START = "start one with `python -m sglang.launch_server --model-path DIR --chunk-cache`"
CONNECT_S = 10.0
FLUSH_S = 30.0
_UNAUTHORIZED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class ServerRefused(ChunkCacheRequestError):
    """The server refuses a request, and would refuse it again."""


class ServerGone(Exception):
    """The server does not answer, or ended in the middle of an answer."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem


class ServerClient:
    """A context manager around connections that threads may share; making one sends nothing.

    Args:
        url: address of the server, without a path.
        api_key: API key of the server; None or empty = it has none.
        timeout_s: longest wait for the next byte of a response; the default allows for a long prompt on a CPU.

    Raises:
        ServerRefused: the URL is malformed.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        headers = {}
        if api_key := (api_key or "").strip():
            if not (api_key.isascii() and api_key.isprintable()):  # httpx would print it
                problem = "it has a character that no HTTP header may have"
                raise user_error(ServerRefused, "--api-key", problem, "give the server's (admin) API key")
            headers["Authorization"] = f"Bearer {api_key}"
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        with self._told():
            self.http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Sends a request and returns the response, whose status is a success.

        Raises:
            ServerRefused, ServerGone: see the head of this file.
        """
        with self._told():
            response = self.http.request(method, path, json=body)
        self._check(response)
        return response

    def ask(self, method: str, path: str, body: Any = None, *, has: tuple[str, ...] = ()) -> dict[str, Any]:
        """Sends a request and returns the JSON object of the response; raises as `send`.

        Args:
            has: fields that the object must have.
        """
        response = self.send(method, path, body)
        try:
            reply = response.json()
        except ValueError:  # no JSON, or no text
            reply = None
        if not isinstance(reply, dict):
            problem = f"{path} was not answered with a JSON object"
            raise self.refused(problem, "name the address of an SGLang server")
        if missing := [name for name in has if reply.get(name) is None]:
            problem = f"{path} was answered without {', '.join(missing)}"
            raise self.refused(problem, "name the address of an SGLang server with --chunk-cache")
        return reply

    def look(self, path: str) -> httpx.Response:
        """The response to a GET, whatever its status is below 500.

        Raises:
            ServerGone: see the head of this file.
        """
        with self._told():
            response = self.http.get(path)
        if response.is_server_error:
            self._check(response)
        return response

    def lines(self, path: str, body: Any) -> Iterator[str]:
        """The lines of the response to a POST, as they arrive; raises as `send`."""
        with self._told(), self.http.stream("POST", path, json=body) as response:
            if not response.is_success:
                response.read()
            self._check(response)
            yield from response.iter_lines()

    def flush(self) -> None:
        """Empties the server's caches; waits while the server is busy with an earlier request.

        Raises:
            TimeoutError: the server was busy for 30 s.
        """
        deadline = time.monotonic() + FLUSH_S
        while True:
            with self._told():
                response = self.http.post("/flush_cache")
            if response.status_code == HTTPStatus.OK:
                return
            if response.status_code in _UNAUTHORIZED:
                self._check(response)
            if time.monotonic() > deadline:
                raise TimeoutError(f"/flush_cache was refused for {FLUSH_S:g} s: is a request still running?")
            time.sleep(0.1)

    def tokenizer_path(self) -> str:
        """The tokenizer of the server: a folder on its machine, or a name; raises as `send`."""
        info = self.ask("GET", "/model_info", has=("model_path",))
        return str(info.get("tokenizer_path") or info["model_path"])

    def refused(self, problem: str, remedy: str) -> ServerRefused:
        return user_error(ServerRefused, f"--url {without_user(self._url)}", problem, remedy)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            why = "" if "@" in self._url else f" ({error})"  # else it may quote a part of the password
            raise self.refused(f"not a URL{why}", "give one such as http://127.0.0.1:30000") from None
        except httpx.TimeoutException:
            raise ServerGone(f"no answer within {self._timeout_s:.0f} s", "look into the server's log") from None
        except httpx.TransportError as error:
            raise ServerGone(f"no server answers ({error})", f"{START}, or name its address") from None
        except httpx.RequestError as error:  # redirected in a circle, or a body that cannot be unpacked
            raise self.refused(f"the answer cannot be read ({error})", "name the address of an SGLang server") from None

    def _check(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        if response.status_code in _UNAUTHORIZED:
            problem = f"{without_user(self._url)} does not accept it"
            raise user_error(ServerRefused, "--api-key", problem, "give the server's (admin) API key")
        problem = f"{response.url.path} was answered with {response.status_code} ({_message(response)})"
        if response.is_server_error:
            raise ServerGone(problem, "look into the server's log")
        is_missing = response.status_code == HTTPStatus.NOT_FOUND
        raise self.refused(
            problem, "start the server with --chunk-cache" if is_missing else "change what the message names"
        )


def one_replica(server_info: Mapping[str, Any]) -> dict[str, int]:
    """Fields of a request to `/generate` that send it to the first replica; none if the server has one replica only.

    Every replica has chunks of its own, and SGLang gives requests to them in turn.

    Args:
        server_info: the answer of `/server_info`.
    """
    num_replicas = [server_info.get(name) or 1 for name in ("dp_size", "attn_dp_size")]
    return {"routed_dp_rank": 0} if max(num_replicas) > 1 else {}


def secret_digest(value: object) -> str:
    """What stands in a file, which may lie in a shared folder, for a value that may hold a password or a tenant."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def without_user(url: str) -> str:
    """A URL for messages and logs: without user and password, also if it is malformed."""
    return re.sub(r"^(.*?//)?.*@", r"\1", url, flags=re.DOTALL)


def _message(response: httpx.Response) -> str:
    """The sentence of an error response; SGLang's routes put it into different objects."""
    try:
        value = response.json()
    except ValueError:
        value = response.text
    while isinstance(value, dict):
        value = value.get("error") or value.get("message") or value.get("detail") or json.dumps(value)
    return " ".join(str(value).split())[:400] or response.reason_phrase
