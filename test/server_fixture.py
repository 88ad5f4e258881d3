"""A real SGLang server for tests: the one of the benchmarks, with the requests that tests make.

- `Server(model_dir, *flags)` is a context manager; use one per module, a start takes 50-80 s on two cores.
- `OneAtATime` for a module that wants several.
- `generate`, `chat`, `post`, `get` ask it and raise as `ServerClient.send` unless told to return the response;
  `flush` empties its caches; `log` is what it has written so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
from benchmark.common import server as base


class Server(base.Server):
    """One server process group. Ready when the context is entered, gone with all children when it is left."""

    def __init__(
        self,
        model_dir: str | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        threads: int | None = 1,
        **options: Any,
    ) -> None:
        """Nothing starts before the context is entered.

        Args:
            threads: OMP_NUM_THREADS; a tiny model is fastest on one. None leaves the choice to the platform.
            options: as for the server of the benchmarks.
        """
        threads_env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        super().__init__(model_dir, *flags, env={**threads_env, **(env or {})}, **options)

    def post(self, path: str, json: Any, *, check: bool = True) -> httpx.Response:
        """POSTs `json`. With `check=False` an error status is returned instead of raised."""
        return super().post(path, json) if check else self.client.http.post(path, json=json)

    def get(self, path: str, *, check: bool = True) -> httpx.Response:
        return super().get(path) if check else self.client.http.get(path)

    def generate(  # type: ignore[override]  # tests want the bare reply, and the log-probabilities
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        *,
        max_new_tokens: int = 8,
        chunk_cache: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        logprobs: bool = False,
        **body: Any,
    ) -> Any:
        """POST /generate, greedy. `prompt` is text or token ids, or a list of either for a batch.

        Args:
            chunk_cache: goes to `sampling_params.custom_params.chunk_cache`.
            sampling: more sampling parameters.
            logprobs: ask for the log-probabilities of the output (top 5 as well).
            body: more fields of the request, such as `extra_key` or `logprob_start_len`.
        """
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        params.update(sampling or {})
        if chunk_cache is not None:
            params["custom_params"] = {"chunk_cache": dict(chunk_cache)}
        field = "text" if _is_text(prompt) else "input_ids"
        request: dict[str, Any] = {field: prompt, "sampling_params": params, **body}
        if logprobs:
            request.update(return_logprob=True, top_logprobs_num=5)
        return self.post("/generate", request).json()

    def chat(self, messages: str | Iterable[Mapping[str, str]], *, max_tokens: int = 8, **body: Any) -> Any:
        """POST /v1/chat/completions, greedy. A plain string is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request = {"model": "default", "messages": list(messages), "temperature": 0, "max_tokens": max_tokens, **body}
        return self.post("/v1/chat/completions", request).json()


class OneAtATime:
    """Of several servers that tests of a module want one after the other, the one that was asked for last.

    A server's processes have 2.5 GB of memory, and a module may want more of them than a machine has room for. A
    context manager; tests that want the same one should stand together.
    """

    def __init__(self) -> None:
        self._name = ""
        self._server: Server | None = None

    def __enter__(self) -> OneAtATime:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()

    def use(self, name: str, make: Callable[[], Server]) -> Server:
        """The server of this name, running; the one before it, if it is another, is stopped."""
        if self._server is None or name != self._name:
            if self._server is not None:
                self._server.stop()
            self._name, self._server = name, make()
            self._server.start()
        return self._server


def output_logprobs(reply: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of the generated tokens from a reply of `generate(..., logprobs=True)`."""
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))
