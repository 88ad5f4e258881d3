"""WarmServer: a server with the chunk cache, as the command sees it.

Verbs: `epoch` (which server, in which life), `warm` (some chunks, streamed). Promises: what a user can mend is a
`WarmRefused` of one sentence; what may pass, because the server is being restarted, is a `ServerGone`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import requests

_CONNECT_S, _READ_S = 10.0, 600.0  # a batch of long chunks on a CPU


class WarmRefused(ValueError):
    """The server says no, and would say so again."""


class ServerGone(Exception):
    """The server does not answer, or ended in the middle of an answer."""


class WarmServer:
    """A context manager around one connection.

    Args:
        url: of the server, without a path.
        api_key: of the administrator, where the server has one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = requests.Session()
        self._http.trust_env = False
        if api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def epoch(self) -> str:
        """Changes when the server was restarted or its cache was flushed: what was stored is gone.

        Raises:
            WarmRefused: there is no chunk cache, or the key is wrong.
            ServerGone: nobody answers.
        """
        stats = self._send("GET", "/chunk_cache/stats").json()
        flushes = "-".join(str(rank["num_flushes"]) for rank in stats["ranks"])
        return f"{stats['instance']}/{flushes}"

    def warm(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines of progress, without the summary.

        Raises:
            WarmRefused: the request is wrong.
            ServerGone: nobody answers, or the answer has no end.
        """
        response = self._send("POST", "/chunk_cache/warm", body)
        try:
            for text in response.iter_lines():
                line = json.loads(text)
                if line.get("summary"):
                    return
                if "error" in line:
                    raise WarmRefused(f"--url {self._url}: {line['error']['message']}")
                yield line
        except (requests.RequestException, json.JSONDecodeError) as error:
            raise ServerGone(_one_line(error)) from None
        finally:
            response.close()
        raise ServerGone("the answer ended before its summary")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        try:
            response = self._http.request(
                method, f"{self._url}{path}", json=body, stream=body is not None, timeout=(_CONNECT_S, _READ_S)
            )
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
            raise WarmRefused(f"--url {self._url}: not a URL; give one such as http://127.0.0.1:30000") from None
        except requests.RequestException as error:
            raise ServerGone(_one_line(error)) from None
        if response.status_code == 200:
            return response
        if response.status_code in (401, 403):
            raise WarmRefused(f"--api-key: the server at {self._url} does not accept it; give its (admin) API key")
        if response.status_code == 404:
            raise WarmRefused(f"--url {self._url}: no chunk cache there; start the server with --chunk-cache")
        if response.status_code == 400:
            raise WarmRefused(f"--url {self._url}: {_message(response)}")
        raise ServerGone(f"HTTP status {response.status_code}")


def _message(response: requests.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
