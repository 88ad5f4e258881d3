"""OwnServer: an SGLang server that a command starts, waits for, and stops with all its processes.

- `OwnServer(model_dir, *flags)` is a context manager; a start takes 20-80 s on two cores, most of it imports.
- `client` sends requests, `flush` empties the caches, `log` is what the server has written so far.
- `offline_env` keeps the server off the network; `leave_on_sigterm` makes SIGTERM to the command stop the server too.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx

from chunk_cache_tools.server_client import ServerClient

START_DEADLINE_S = 420.0
STOP_DEADLINE_S = 10.0
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """The server ended or was not ready in time; the message ends with the tail of its log."""


def offline_env() -> dict[str, str]:
    """Environment variables that keep the Hugging Face libraries off the network."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def leave_on_sigterm() -> None:
    """Makes SIGTERM end this process like `sys.exit`: `finally` blocks run, and servers are stopped.

    So does SIGHUP, the end of a terminal, unless it is ignored already (`nohup`).
    """
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


OWN_FLAGS = ("--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key")
"""Flags that a user may not give: `OwnServer` sets them, or its client would have to know them."""


class OwnServer:
    """One server process group: ready when the context is entered, ended with all children when it is left."""

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
            flags: flags of `launch_server`, after the model, host and port.
            env: environment variables added to those of this process.
            log_path: file for the server's output; a new temporary file by default.
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

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Launches the server and waits until a health check has generated a token."""
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
        signal_group(process.pid, signal.SIGCONT)
        # Only the leader is signalled at first: it ends the others, and would diagnose a child's sudden end as a crash.
        process.terminate()
        if not _wait_for_group(process, STOP_DEADLINE_S):
            signal_group(process.pid, signal.SIGKILL)
            _wait_for_group(process, STOP_DEADLINE_S)
        process.wait()

    @property
    def url(self) -> str:
        """Address of the server, without a slash at the end."""
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

    def flush(self) -> None:
        """Empties the caches, as `ServerClient.flush`."""
        self.client.flush()

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
    """A TCP port that nobody listens on now. SGLang takes further ports above it and looks for free ones itself.

    The port is below 32,768: above, Linux could give it to an outgoing connection before the server listens on it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def signal_group(pid: int, number: int) -> bool:
    """Sends a signal to a process group; returns whether the group exists."""
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
        if not signal_group(process.pid, 0):
            return True
        time.sleep(0.1)
    return False
