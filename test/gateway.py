"""Gateway: SGLang's model gateway in front of servers, as its users start it.

A context manager: it is ready when all replicas are, and gone when it is left. `http` asks it; `kill` ends it at once,
`start` begins anew on the same port. `find_gateway` says where it is installed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx
from benchmark.common.server import ServerError, free_port, signal_group

QUICK = (
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "2"),
)
"""A replica that died, or is back, is noticed within two seconds; by default that takes minutes (docs/fleet.md)."""

READY_S = 60.0
STOP_S = 10.0


def find_gateway() -> str | None:
    """The command; None where it is not installed (make gateway)."""
    beside = Path(sys.executable).parent / "smg"
    return str(beside) if beside.exists() else shutil.which("smg")


class Gateway:
    """See the head of this file.

    Args:
        urls: of the replicas.
        flags: of `smg launch`.
    """

    def __init__(self, urls: Sequence[str], *flags: str) -> None:
        self.port, self._metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=90.0, trust_env=False)
        self._urls, self._flags = list(urls), flags
        self._log = Path(tempfile.mkstemp(prefix="gateway-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._end(signal.SIGTERM)

    def command(self) -> list[str]:
        smg = find_gateway()
        assert smg is not None, "no gateway here (make gateway)"
        ports = ("--port", str(self.port), "--prometheus-port", str(self._metrics_port))
        return [smg, "launch", "--host", "127.0.0.1", *ports, "--worker-urls", *self._urls, *self._flags]

    def start(self) -> None:
        """Returns when it knows that all replicas are healthy."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + READY_S
        while self.num_healthy() < len(self._urls):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                raise ServerError(f"the gateway is not ready; its log, {self._log}:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.1)

    def num_healthy(self) -> int:
        """Replicas to which it would send a request."""
        try:
            reply = self.http.get("/readiness")
        except httpx.TransportError:
            return 0
        return int(reply.json()["healthy_workers"]) if reply.status_code == 200 else 0

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        signal_group(process.pid, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
