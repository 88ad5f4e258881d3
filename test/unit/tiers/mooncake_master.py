"""A Mooncake master of the tests' own, as a process that can be killed, stopped and started again (`make mooncake`).

Memory comes from its clients: the media under test, or `lend`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from benchmark.common.machine import ROOT
from benchmark.common.server import free_port

PROGRAM = Path(sys.executable).parent / "mooncake_master"
LIBRARIES = [str(folder) for folder in (ROOT / ".tools" / "mooncake").glob("**/lib/*-linux-gnu")]


def library_env() -> dict[str, str]:
    """Variables with which a process finds the libraries that `make mooncake` unpacked, if it did."""
    return {"LD_LIBRARY_PATH": ":".join([*LIBRARIES, os.environ.get("LD_LIBRARY_PATH", "")])} if LIBRARIES else {}


def is_there() -> bool:
    """Whether this process can use the client; it loads the libraries."""
    for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
        for folder in LIBRARIES:
            with suppress(OSError):
                ctypes.CDLL(f"{folder}/{name}", mode=ctypes.RTLD_GLOBAL)
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        return False
    return PROGRAM.exists()


class MooncakeMaster:
    """Keeps its port over restarts, and nothing else."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port, self._metrics_port = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Ready when it returns."""
        ports = ["--rpc_port", str(self._port), "--metrics_port", str(self._metrics_port)]
        self._process = self._spawn([PROGRAM, *ports, "--client_ttl", "3"])
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                self.held()
                return
            except OSError:
                assert self._process.poll() is None, "the master ended at once"
                assert time.monotonic() < deadline, "the master does not answer"
                time.sleep(0.05)

    def lend(self, segment: str) -> subprocess.Popen[bytes]:
        """A process that only gives memory to the store."""
        command = [PROGRAM.with_name("mooncake_client"), "--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--master_server_address", f"127.0.0.1:{self._port}", "--metadata_server", "P2PHANDSHAKE"]
        return self._spawn([*command, "--global_segment_size", segment])

    def held(self) -> list[str]:
        """All keys that the store holds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/get_all_keys", timeout=5) as reply:
            return sorted(reply.read().decode().split())

    def kill(self) -> None:
        if self._process is not None:
            self.go_on()
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It accepts connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _spawn(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env={**os.environ, **library_env()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)
