"""Pair: a prefill server and a decode server with SGLang's gateway in front, as `docs/fleet.md` starts them.

A context manager: ready when the gateway knows both, gone with all processes when it is left. KV goes from one to the
other by Mooncake over TCP (`make mooncake`). `http` asks the gateway.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx
from benchmark.common.server import free_port

from doc_pages import blocks, section
from gateway import Gateway
from server_fixture import Server

RETRACTION = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""By default a decode server does not start where less than 10 GiB of memory are free."""


def commands() -> list[list[str]]:
    """The command lines of the page: prefill server, decode server, gateway."""
    found = blocks(section("fleet.md", "Prefill and decode apart"), "bash")
    return [shlex.split(block.replace("\\\n", " ")) for block in found[:3]]


class PairGateway(Gateway):
    """The gateway of a pair.

    Args:
        flags: of the page; its addresses are replaced.
    """

    def __init__(self, prefill: Server, bootstrap_port: str, decode: Server, flags: list[str]) -> None:
        super().__init__([prefill.url, decode.url])
        found = re.findall(r"http://\S+", " ".join(flags))
        own = {found[0]: prefill.url, found[1]: decode.url, flags[flags.index(found[0]) + 1]: bootstrap_port}
        self._pair_flags = [own.get(word, word) for word in flags]

    def command(self) -> list[str]:
        head = super().command()
        return [*head[: head.index("--worker-urls")], *self._pair_flags]


class Pair:
    """See the head of this file.

    Args:
        flags: of both servers.
        prefill_flags, decode_flags: of one of them.
        env: variables of both.
    """

    def __init__(
        self,
        model_dir: Path,
        *flags: str,
        prefill_flags: tuple[str, ...] = (),
        decode_flags: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        prefill, decode, gateway = commands()
        port = str(free_port())
        prefill[prefill.index("--disaggregation-bootstrap-port") + 1] = port
        self.prefill = Server(model_dir, *_flags_of(prefill), *flags, *prefill_flags, env=env)
        self.decode = Server(model_dir, *_flags_of(decode), *flags, *RETRACTION, *decode_flags, env=env)
        self.gateway = PairGateway(self.prefill, port, self.decode, gateway[gateway.index("--pd-disaggregation") :])

    @property
    def http(self) -> httpx.Client:
        """Asks the gateway."""
        return self.gateway.http

    def __enter__(self) -> Self:
        try:
            self.prefill.start()
            self.decode.start()
            self.gateway.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.gateway.__exit__()
        self.decode.stop()
        self.prefill.stop()


def _flags_of(command: list[str]) -> list[str]:
    """The flags of a server without its model and its port, which are the test's own."""
    flags = command[command.index("--model-path") + 2 :]
    port = flags.index("--port")
    return flags[:port] + flags[port + 2 :]
