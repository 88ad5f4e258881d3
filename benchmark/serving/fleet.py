"""Fleet: one server per kind of system, of which one runs at a time; the others are paused.

An idle SGLang server keeps a core busy, so `use` stops all but one. Servers start together, and a short request wakes
what was paused before anything is measured.
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
    """Servers of one model. A context manager; `use` gives the server of a kind, running alone.

    Args:
        kinds: keys of `SERVER_FLAGS`.
        flags: of all servers.
        log_dir: where they write their logs.
        env: variables of all servers, on top of this process's own.
    """

    def __init__(
        self,
        model_dir: Path,
        kinds: Iterable[str],
        flags: Sequence[str],
        log_dir: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._servers = {
            kind: Server(
                model_dir,
                *flags,
                *SERVER_FLAGS[kind],
                env={**offline_env(), **(env or {})},
                log_path=log_dir / f"{model_dir.name}-{kind}.log",
                start_deadline_s=900,
            )
            for kind in dict.fromkeys(kinds)
        }
        self._running: str | None = None

    def __enter__(self) -> Fleet:
        # Starts are mostly imports: two at a time fill two cores, more only fight for them.
        with ThreadPoolExecutor(2) as starters:
            try:
                servers = self._servers.values()
                for server, _ in zip(servers, starters.map(Server.start, servers), strict=True):
                    server.pause()
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def use(self, kind: str) -> Server:
        """The server of this kind, awake, the others paused."""
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
        """Seconds that each start took, beside the others."""
        return {kind: round(server.start_s, 1) for kind, server in self._servers.items()}

    def _stop(self) -> None:
        for server in self._servers.values():
            server.stop()


def machine_speed() -> float:
    """GFLOP/s of a matrix product on this process's cores just now: shows when the machine has become slower."""
    a = torch.ones(GEMM_SIZE, GEMM_SIZE)
    num, began = 0, time.perf_counter()
    while time.perf_counter() - began < GEMM_S:
        a @ a
        num += 1
    return round(num * 2 * GEMM_SIZE**3 / (time.perf_counter() - began) / 1e9, 1)
