"""PreparedSession: a session whose chunks are stored as computed behind their neighbours (FusionRAG section 3.1)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.quality.neighbourhood import Neighbours
from benchmark.quality.prompts import Prompt

from chunk_cache_tools.server_client import ServerClient
from chunk_cache_tools.verify.session import Asking, Session, SetupError

PREPARED = "prepared"
MAX_WARMED = 256  # chunks in one call, whose neighbours must fit into it too
BATCH = 2  # at a time: each brings all its neighbours into the pool


class PreparedSession(Session):
    """See the head of this file."""

    def __init__(self, client: ServerClient, asking: Asking, neighbours: Neighbours) -> None:
        super().__init__(client, asking)
        self._neighbours = neighbours

    def prime(self, prompts: Sequence[Prompt]) -> None:  # type: ignore[override]
        """Empties the caches and prepares every chunk of these prompts."""
        self._flush()
        heads = {prompt.partition: prompt.head for prompt in prompts}
        for partition, head in heads.items():
            chunks = list(dict.fromkeys(chunk for p in prompts if p.partition == partition for chunk in p.chunks))
            for first in range(0, len(chunks), MAX_WARMED):
                self._prepare(partition, head, chunks[first : first + MAX_WARMED])

    def _prepare(self, partition: str, head: str, chunks: Sequence[str]) -> None:
        near = self._neighbours[partition]
        texts = list(dict.fromkeys((*chunks, *(other for one in chunks for other in near[one]))))
        places = {text: place for place, text in enumerate(texts)}
        body = {
            "texts": texts,
            "neighbours": [[places[other] for other in near[one]] for one in chunks],
            "prefix_text": head,
            "extra_key": partition,
            "batch": BATCH,
        }
        summary = json.loads(list(self._client.lines("/chunk_cache/warm", body))[-1])
        if summary["failed"]:
            raise SetupError(f"A chunk was not prepared: {summary['failed'][0]['error']}.")

    def _check_stored(self, prompt: Prompt, chunk_cache: Mapping[str, Any]) -> None:  # type: ignore[override]
        near = self._neighbours[prompt.partition]
        for number, (text, chunk) in enumerate(zip(prompt.chunks, chunk_cache["chunks"], strict=True), 1):
            if chunk["status"] == "hit" and near[text] and chunk.get("kind") != "prepared":
                raise SetupError(
                    f"Chunk {number} of prompt {prompt.key} was not used as prepared; give the server a larger "
                    "--max-total-tokens in --server-flags."
                )
