"""Fleet: one server per kind of system; one runs at a time, the others are paused.

`keep` says which kinds are wanted from now on, `use` returns one. An idle SGLang server keeps a core busy, so all but
one are paused; after a pause a short request wakes the server before anything is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from benchmark.common.server import Server, offline_env
from benchmark.serving.systems import SERVER_FLAGS

WAKE = [3, 4, 5, 6]  # token ids that every model has
GEMM_SIZE, GEMM_S = 1024, 0.3


class Fleet:
    """Servers of one model. A context manager; `use` returns the server of a kind and pauses the others.

    Args:
        flags: flags of all servers, beside the size of their KV pool.
        log_dir: where they write their logs.
        env: environment variables of all servers, beside this process's own.

    Attributes:
        model_dir: the model of every server.
        pool_len: tokens of the KV pool of every server.
    """

    def __init__(
        self,
        model_dir: Path,
        pool_len: int,
        log_dir: Path,
        *,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.pool_len = pool_len
        self.model_dir = model_dir
        self._log_dir = log_dir
        self._flags = flags
        self._env = {**offline_env(), **(env or {})}
        self._servers: dict[str, Server] = {}
        self._running: str | None = None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep(())

    def keep(self, kinds: Iterable[str]) -> None:
        """Starts servers of these kinds where missing, and stops all others, since each has a KV pool in memory."""
        wanted = list(dict.fromkeys(kinds))
        for kind in self._servers.keys() - set(wanted):
            self._servers.pop(kind).stop()
            if self._running == kind:
                self._running = None
        if self._running is not None:
            self._servers[self._running].pause()
            self._running = None
        missing = {kind: self._server(kind) for kind in wanted if kind not in self._servers}
        self._servers |= missing
        # Starts are mostly imports: two at a time keep two cores busy.
        with ThreadPoolExecutor(2) as starters:
            try:
                for server, _ in zip(missing.values(), starters.map(Server.start, missing.values()), strict=True):
                    server.pause()
            except BaseException:
                for server in self._servers.values():
                    server.stop()
                raise

    def _server(self, kind: str) -> Server:
        own = SERVER_FLAGS[kind]
        return Server(
            self.model_dir,
            *("--max-total-tokens", str(self.pool_len)),
            *self._flags,
            *own,
            env=self._env,
            log_path=self._log_dir / f"{self.model_dir.name}-{kind}.log",
            start_deadline_s=900,
        )

    def use(self, kind: str) -> Server:
        """The server of this kind, running; the others are paused."""
        server = self._servers[kind]
        if self._running != kind:
            if self._running is not None:
                self._servers[self._running].pause()
            server.resume()
            self._running = kind
            server.generate(WAKE, max_new_tokens=2, extra_key="wake")
        return server

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds that each start took; two run at a time."""
        return {kind: round(server.start_s, 1) for kind, server in self._servers.items()}


def machine_speed() -> float:
    """GFLOP/s of a matrix product on this process's cores; it shows when the machine has become slower."""
    a = torch.ones(GEMM_SIZE, GEMM_SIZE)
    num, began = 0, time.perf_counter()
    while time.perf_counter() - began < GEMM_S:
        a @ a
        num += 1
    return round(num * 2 * GEMM_SIZE**3 / (time.perf_counter() - began) / 1e9, 1)
