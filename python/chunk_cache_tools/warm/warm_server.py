"""WarmServer: the requests of `chunk-cache warm` to a server with the chunk cache.

Verbs: `epoch` (tells whether the server is still the same), `warm` (has chunks computed, streams the progress),
`estimate` (dry run); `warming` reads the reply, for any client. All raise as `ServerClient.send`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from chunk_cache_tools.server_client import ServerClient, ServerGone


class WarmServer(ServerClient):
    """See the head of this file."""

    def epoch(self) -> str:
        """A name that changes when the server is restarted or its cache flushed, since stored chunks are then gone."""
        stats = self.ask("GET", "/chunk_cache/stats", has=("instance", "ranks"))
        flushes = "-".join(str(rank["num_flushes"]) for rank in stats["ranks"])
        return f"{stats['instance']}/{flushes}"

    def warm(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Warms chunks; gives the lines of progress, without the summary."""
        return (line for line in warming(self, body) if not line.get("summary"))

    def estimate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The summary of a dry run."""
        return next(warming(self, {**body, "dry_run": True}))


def warming(client: ServerClient, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the reply to a request that warms chunks, of which the last is the summary."""
    for text in client.lines("/chunk_cache/warm", body):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if "error" in line:
            raise client.refused(line["error"]["message"], "change what the message names")
        yield line
        if line.get("summary"):
            return
    raise ServerGone("the answer ended before its summary", "look into the server's log")
