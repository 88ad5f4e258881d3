"""StoreProcess: a store of the tests' own, as a process that can be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path


def spawn(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A silent process in a group of its own, `env` on top of our variables."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )


class StoreProcess(ABC):
    """Keeps its port over restarts, and nothing else."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def answers(self) -> bool:
        """Whether it can be asked now."""

    def run(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Ready when it returns."""
        self._process = spawn(command, env)
        deadline = time.monotonic() + 20
        while not self.answers():
            assert self._process.poll() is None, "the server ended at once"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

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
