"""A real SGLang server for tests: started with `launch_server`, waited for, asked, stopped with all its processes.

- `Server(model_dir, *flags)` is a context manager; use one per module, a start takes 50-80 s on two cores.
- `generate`, `chat`, `post`, `get` ask it and raise `HTTPStatusError` unless told to return the response;
  `flush` empties its caches; `log` is what it has written so far.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

START_DEADLINE_S = 420.0
STOP_DEADLINE_S = 10.0
LOG_TAIL_LINES = 60


class ServerDied(RuntimeError):
    """The server ended or was not ready in time; the message ends with the tail of its log."""


class Server:
    """One server process group. Ready when the context is entered, gone with all children when it is left."""

    def __init__(
        self,
        model_dir: str | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        threads: int | None = 1,
        log_path: str | Path | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        request_timeout_s: float = 300.0,
    ) -> None:
        """Nothing starts before the context is entered.

        Args:
            flags: of `launch_server`, after the model, host and port.
            env: variables on top of this process's own.
            threads: OMP_NUM_THREADS; a tiny model is fastest on one. None leaves the choice to the platform.
            log_path: where the server writes; a new temporary file by default.
        """
        self.model_dir = Path(model_dir)
        self.flags = tuple(flags)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0  # measured: seconds from launch to ready
        self._env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), **(env or {})}
        self._start_deadline_s = start_deadline_s
        self._log_path = Path(log_path) if log_path else Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
        self._client = httpx.Client(base_url=self.url, timeout=request_timeout_s, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Launches and waits until a health check has generated a token."""
        began = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(began + self._start_deadline_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - began

    def command(self) -> list[str]:
        """The command line, as a user would type it."""
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(self.model_dir), "--host", "127.0.0.1", "--port", str(self.port)),
            *self.flags,
        ]

    def stop(self) -> None:
        """Ends every process of the group; returns when the port's owner is gone."""
        process, self._process = self._process, None
        self._client.close()
        if process is None:
            return
        # First the leader alone: it ends the others, and takes a child's sudden end for a crash to be diagnosed.
        process.terminate()
        if not _wait_for_group(process, STOP_DEADLINE_S):
            _signal_group(process.pid, signal.SIGKILL)
            _wait_for_group(process, STOP_DEADLINE_S)
        process.wait()

    @property
    def log(self) -> str:
        """Everything the server has written, standard error included."""
        return self._log_path.read_text(errors="replace")

    def alive(self) -> bool:
        """Whether the main process runs; it ends when one of the others dies."""
        return self._process is not None and self._process.poll() is None

    def post(self, path: str, json: Any, *, check: bool = True) -> httpx.Response:
        """POSTs `json`. With `check=False` an error status is returned instead of raised."""
        return _checked(self._client.post(path, json=json), check)

    def get(self, path: str, *, check: bool = True) -> httpx.Response:
        return _checked(self._client.get(path), check)

    def generate(
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

    def flush(self) -> None:
        """Empties the caches; waits while the server is still busy with an earlier request."""
        deadline = time.monotonic() + 30
        while self.post("/flush_cache", None, check=False).status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("/flush_cache was refused for 30 s: is a request still running?")
            time.sleep(0.1)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if not self.alive():
                raise ServerDied(self._death_note(f"ended with code {self._returncode()}"))
            try:
                if self._client.get("/health_generate", timeout=20).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.3)
        raise ServerDied(self._death_note(f"was not ready within {self._start_deadline_s:.0f} s"))

    def _returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def _death_note(self, what: str) -> str:
        tail = "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])
        return f"{' '.join(self.command())}\n{what}; the end of {self._log_path}:\n{tail}"


def free_port() -> int:
    """A TCP port that nobody listens on now. SGLang takes further ports above it and looks for free ones itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def output_logprobs(reply: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of the generated tokens from a reply of `generate(..., logprobs=True)`."""
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))


def _checked(response: httpx.Response, check: bool) -> httpx.Response:
    if check and response.is_error:
        message = f"{response.status_code} from {response.url}: {response.text[:2000]}"
        raise httpx.HTTPStatusError(message, request=response.request, response=response)
    return response


def _signal_group(pid: int, number: int) -> bool:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """True once no process of the group is left. Polls, because only the leader is our child."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        process.poll()
        if not _signal_group(process.pid, 0):
            return True
        time.sleep(0.1)
    return False
