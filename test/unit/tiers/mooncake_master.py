"""A Mooncake master of the tests' own, as a process that can be killed, stopped and started again (`make mooncake`).

Memory comes from its clients: the media under test, or `lend`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

from benchmark.common.machine import ROOT
from benchmark.common.server import free_port

from unit.tiers.store_process import StoreProcess, spawn

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


class MooncakeMaster(StoreProcess):
    """See `StoreProcess`."""

    def __init__(self) -> None:
        super().__init__()
        self._port, self._metrics_port = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self._port}"

    def start(self) -> None:
        ports = ["--rpc_port", str(self._port), "--metrics_port", str(self._metrics_port)]
        self.run([PROGRAM, *ports, "--client_ttl", "3"], library_env())

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            self.held()
        except OSError:
            return False
        return True

    def lend(self, segment: str) -> subprocess.Popen[bytes]:
        """A process that only gives memory to the store."""
        command = [PROGRAM.with_name("mooncake_client"), "--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--master_server_address", f"127.0.0.1:{self._port}", "--metadata_server", "P2PHANDSHAKE"]
        return spawn([*command, "--global_segment_size", segment], library_env())

    def held(self) -> list[str]:
        """All keys that the store holds."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/get_all_keys", timeout=5) as reply:
            return sorted(reply.read().decode().split())
