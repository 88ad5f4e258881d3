"""A real SGLang server for measurements: the `OwnServer` of the commands, with the requests that benchmarks make.

- `Server(model_dir, *flags)` is started, waited for and stopped like an `OwnServer`.
- `generate`, `stream`, `post`, `get` send requests and raise like `ServerClient.send`.
- `bad_log_lines`: lines of the log that a healthy server does not write.
- `pause`, `resume`: an idle SGLang server keeps a core busy by polling, so one that is not being measured is paused.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from chunk_cache_tools.own_server import OwnServer, ServerError, free_port, leave_on_sigterm, offline_env, signal_group

__all__ = ["Server", "ServerError", "Timed", "free_port", "leave_on_sigterm", "offline_env"]


@dataclass(frozen=True)
class Timed:
    """A reply of the server, with times by the client's clock.

    Attributes:
        reply: the JSON object of the reply, or of the last event of a stream.
        first_s: seconds from sending the request to the first generated token.
        total_s: seconds from sending the request to the end of the reply.
    """

    reply: dict[str, Any]
    first_s: float
    total_s: float

    @property
    def chunk_cache(self) -> dict[str, Any]:
        """The `chunk_cache` object of the reply."""
        return self.reply["meta_info"]["chunk_cache"]


_BAD_LOG = ("Traceback", "memory leak", "AssertionError", "Scheduler hit an exception")


class Server(OwnServer):
    """See the head of this file."""

    @property
    def bad_log_lines(self) -> list[str]:
        """Lines of the log that tell of a crash or of leaked KV slots."""
        return [line for line in self.log.splitlines() if any(bad in line for bad in _BAD_LOG)]

    def pause(self) -> None:
        """Stops all its processes; a request that is sent meanwhile waits."""
        signal_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        signal_group(self.pid, signal.SIGCONT)

    def post(self, path: str, json: Any) -> httpx.Response:
        return self.client.send("POST", path, json)

    def get(self, path: str) -> httpx.Response:
        return self.client.send("GET", path)

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 1,
        chunk_cache: Mapping[str, Any] | None = None,
        **body: Any,
    ) -> Timed:
        """POST /generate, greedy, answered as a whole.

        Args:
            prompt: text or token ids.
            chunk_cache: goes to `sampling_params.custom_params.chunk_cache`.
            body: more fields of the request, such as `extra_key`.
        """
        request = _request(prompt, max_new_tokens, chunk_cache, body)
        began = time.perf_counter()
        response = self.post("/generate", request)
        total_s = time.perf_counter() - began
        return Timed(response.json(), total_s, total_s)

    def stream(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 8,
        chunk_cache: Mapping[str, Any] | None = None,
        **body: Any,
    ) -> Timed:
        """Like `generate`, but streamed: `first_s` is the arrival of the first event."""
        request = {**_request(prompt, max_new_tokens, chunk_cache, body), "stream": True}
        first_s, last = 0.0, ""
        began = time.perf_counter()
        for line in self.client.lines("/generate", request):
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began
                last = line
        total_s = time.perf_counter() - began
        reply = json.loads(last.removeprefix("data: "))
        if "error" in reply:
            raise RuntimeError(f"/generate: {reply['error']}")
        return Timed(reply, first_s, total_s)


def _request(
    prompt: str | list[int], max_new_tokens: int, chunk_cache: Mapping[str, Any] | None, body: Mapping[str, Any]
) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if chunk_cache is not None:
        params["custom_params"] = {"chunk_cache": dict(chunk_cache)}
    field = "text" if isinstance(prompt, str) else "input_ids"
    return {field: prompt, "sampling_params": params, **body}
