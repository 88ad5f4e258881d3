"""ExplainClient: the requests that an explanation needs, sent to a running server.

Verbs: `prime` (has each chunk computed behind the head, so that it is stored), `explain` (asks the whole prompt under
one method). The head is the text before the first chunk.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from chunk_cache.errors import user_error
from chunk_cache.prompt.marks import MarkedText
from chunk_cache_tools.conditions import Condition
from chunk_cache_tools.server_client import START, ServerClient, ServerRefused, one_replica

_KEY = "chunk_cache"


class ExplainClient(ServerClient):
    """See the head of this file. All its verbs raise as `ServerClient.send`.

    Args:
        separator: the text that marks chunks on this server.
        extra_key: `extra_key` of all requests, which selects a partition of the cache; None = none.
    """

    def __init__(self, url: str, api_key: str | None, separator: str, extra_key: str | None) -> None:
        super().__init__(url, api_key)
        self._separator = separator
        self._extra_key = extra_key

    @cached_property
    def _replica(self) -> dict[str, int]:
        return one_replica(self.ask("GET", "/server_info"))

    def prime(self, marked: MarkedText) -> None:
        """Has every different chunk computed once, behind the head."""
        for chunk in dict.fromkeys(marked.chunks):
            self._generate((marked.pieces[0], chunk, ""), {"mode": "auto"}, 0)

    def explain(self, marked: MarkedText, condition: Condition, max_new_tokens: int) -> dict[str, Any]:
        """The reply of `/generate` to the whole prompt."""
        return self._generate(marked.pieces, {**condition.request, "explain": True}, max_new_tokens)

    def _generate(self, pieces: tuple[str, ...], params: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "text": self._separator.join(pieces),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "custom_params": {_KEY: params},
            },
            **self._replica,
        }
        if self._extra_key is not None:
            body["extra_key"] = self._extra_key
        reply = self.ask("POST", "/generate", body)
        found = reply.get("meta_info", {}).get(_KEY)
        if found is None:
            raise self.refused("the server runs without --chunk-cache", START)
        if len(found["chunks"]) != len(pieces) - 2:
            problem = f"the server found {len(found['chunks'])} chunks instead of {len(pieces) - 2}"
            raise user_error(ServerRefused, "--separator", problem, "name the server's --chunk-cache-separator")
        return reply
