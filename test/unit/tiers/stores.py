"""The stores that several servers can share, by name; `STORES`, `find_store`."""

from __future__ import annotations

from pathlib import Path

from unit.tiers.mooncake_master import MooncakeMaster, is_there
from unit.tiers.redis_server import RedisServer, find_binary
from unit.tiers.store_process import StoreProcess

STORES = ("mooncake", "valkey")
HOW_TO_GET = {"mooncake": "make mooncake", "valkey": "make install"}


def find_store(name: str, folder: Path) -> tuple[StoreProcess, str] | None:
    """One that was not started yet, and the url of `remote` for it; None where it is not installed."""
    if name == "mooncake":
        if not is_there():
            return None
        master = MooncakeMaster()
        return master, f"{master.url}?segment=256MiB"
    binary = find_binary()
    if binary is None:
        return None
    server = RedisServer(binary, folder)
    return server, server.url
