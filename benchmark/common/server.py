"""A real SGLang server for measurements: started, waited for, asked, stopped with all its processes.

- `Server(model_dir, *flags)` is a context manager; a start takes 20-80 s on two cores, most of it imports.
- `generate`, `stream`, `post`, `get` ask it and raise as `ServerClient.send`, which is `client`; `flush` empties its
  caches; `log` is what it has written so far.
- `pause`, `resume`: an idle SGLang server keeps a core busy with waiting; one that is not measured just now is paused.
- `offline_env` keeps it from looking for anything on the network; `leave_on_sigterm` makes sure that it is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import httpx

from sglang_chunk_cache.server_client import ServerClient

START_DEADLINE_S = 420.0
STOP_DEADLINE_S = 10.0
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """The server ended or was not ready in time; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Timed:
    """A reply of the server and the client's own clock.

    Attributes:
        reply: the JSON object of the (last) event.
        first_s: seconds from sending the request to the first generated token.
        total_s: seconds from sending the request to the end of the reply.
    """

    reply: dict[str, Any]
    first_s: float
    total_s: float

    @property
    def chunk_cache(self) -> dict[str, Any]:
        """What the chunk cache says of this request."""
        return self.reply["meta_info"]["chunk_cache"]


def offline_env() -> dict[str, str]:
    """Variables with which the Hugging Face libraries stay away from the network."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def leave_on_sigterm() -> None:
    """From now on SIGTERM ends this process like `sys.exit`: `finally` runs, and servers are stopped."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Server:
    """One server process group. Ready when the context is entered, gone with all children when it is left."""

    def __init__(
        self,
        model_dir: str | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        request_timeout_s: float = 300.0,
    ) -> None:
        """Nothing starts before the context is entered.

        Args:
            flags: of `launch_server`, after the model, host and port.
            env: variables on top of this process's own.
            log_path: where the server writes; a new temporary file by default.
        """
        self.model_dir = Path(model_dir)
        self.flags = tuple(flags)
        self.port = free_port()
        self.start_s = 0.0  # measured: seconds from launch to ready
        self._env = {**os.environ, **(env or {})}
        self._start_deadline_s = start_deadline_s
        self.log_path = Path(log_path) if log_path else Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
        self.client = ServerClient(self.url, timeout_s=request_timeout_s)
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
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
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
        """Ends every process of the group; returns when none of them is left."""
        process, self._process = self._process, None
        self.client.http.close()
        if process is None:
            return
        _signal_group(process.pid, signal.SIGCONT)
        # First the leader alone: it ends the others, and takes a child's sudden end for a crash to be diagnosed.
        process.terminate()
        if not _wait_for_group(process, STOP_DEADLINE_S):
            _signal_group(process.pid, signal.SIGKILL)
            _wait_for_group(process, STOP_DEADLINE_S)
        process.wait()

    def pause(self) -> None:
        """Stops the clock of all its processes; a request that is sent meanwhile waits."""
        assert self._process is not None, "not started"
        _signal_group(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        assert self._process is not None, "not started"
        _signal_group(self._process.pid, signal.SIGCONT)

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the server has written, standard error included."""
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Process id of the main process; the others are its children."""
        assert self._process is not None, "not started"
        return self._process.pid

    def alive(self) -> bool:
        """Whether the main process runs; it ends when one of the others dies."""
        return self._process is not None and self._process.poll() is None

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
        """A reply as of `generate`, but streamed: `first_s` is the arrival of the first event."""
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

    def flush(self) -> None:
        """Empties the caches; waits while the server is still busy with an earlier request."""
        deadline = time.monotonic() + 30
        while self.client.http.post("/flush_cache").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError("/flush_cache was refused for 30 s: is a request still running?")
            time.sleep(0.1)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if not self.alive():
                assert self._process is not None
                raise ServerError(self._death_note(f"ended with code {self._process.returncode}"))
            try:
                if self.client.http.get("/health_generate", timeout=20).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.3)
        raise ServerError(self._death_note(f"was not ready within {self._start_deadline_s:.0f} s"))

    def _death_note(self, what: str) -> str:
        tail = "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])
        return f"The server {what}. The end of its log, {self.log_path}:\n{tail}\nIt was: {' '.join(self.command())}"


def free_port() -> int:
    """A TCP port that nobody listens on now. SGLang takes further ports above it and looks for free ones itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _request(
    prompt: str | list[int], max_new_tokens: int, chunk_cache: Mapping[str, Any] | None, body: Mapping[str, Any]
) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if chunk_cache is not None:
        params["custom_params"] = {"chunk_cache": dict(chunk_cache)}
    field = "text" if isinstance(prompt, str) else "input_ids"
    return {field: prompt, "sampling_params": params, **body}


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
