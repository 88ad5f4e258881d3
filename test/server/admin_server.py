"""AdminServer: a server that is always asked with its API key.

Verbs: `ask`, `refuse` (a route under /chunk_cache/: its reply, or its error), `stats`, `rank`, `stored_tokens`, `warm`.
"""

from __future__ import annotations

import json
from typing import Any

from server_fixture import Server

KEY = "key of the tests"


class AdminServer(Server):
    """See the head of this file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client.http.headers["Authorization"] = f"Bearer {KEY}"

    def ask(self, route: str, **body: Any) -> Any:
        return self.post(f"/chunk_cache/{route}", body).json()

    def refuse(self, route: str, body: Any) -> tuple[int, str]:
        response = self.post(f"/chunk_cache/{route}", body, check=False)
        return response.status_code, response.json()["error"]["message"]

    def stats(self) -> Any:
        return self.get("/chunk_cache/stats").json()

    def rank(self) -> Any:
        return self.stats()["ranks"][0]

    def stored_tokens(self, key: str) -> int:
        """Of a chunk; 0 where it is not known."""
        response = self.get(f"/chunk_cache/variants?key={key}", check=False)
        if response.status_code == 404:
            return 0
        return max(variant["stored_tokens"] for variant in response.json()["variants"])

    def warm(self, **body: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.post("/chunk_cache/warm", body).text.splitlines()]
