"""Replica: what a server publishes, by SGLang's publisher, without the server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chunk_cache.events.event_log import POOL
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.event_config import EventConfig
from chunk_cache_tools.holders import Source
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.event_publisher import EventPublisher

SALT = "salt"
TOKENS_PER_CHUNK = 7
NOBODY = Partition()


def tokens(number: int) -> list[int]:
    """Token ids of a chunk."""
    return [1_000_000 + TOKENS_PER_CHUNK * number + i for i in range(TOKENS_PER_CHUNK)]


class Replica:
    """A publisher at two addresses in a folder; `start` it again and it is another server there."""

    def __init__(self, folder: Path, name: str) -> None:
        self.source = Source(f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay")
        self.name = name
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        config = EventConfig(self.source.endpoint, SALT, self.source.replay_endpoint)
        self.events = EventPublisher(
            config, ChunkMetrics(enabled=False), instance=f"{self.name}-{self.num_starts}", dp_rank=0
        )
        self.events.publish()

    def stop(self) -> None:
        self.events._publisher.shutdown()

    def store(self, numbers: Iterable[int], tier: str = POOL, partition: Partition = NOBODY, name: str = "n") -> None:
        for number in numbers:
            key = chunk_key(partition, tokens(number))
            self._observer(tier).stored(key, name, partition.key, TOKENS_PER_CHUNK)
        self.events.publish()

    def remove(self, numbers: Iterable[int], tier: str = POOL, name: str = "n") -> None:
        for number in numbers:
            self._observer(tier).removed(chunk_key(NOBODY, tokens(number)), name)
        self.events.publish()

    def clear(self, tier: str = POOL) -> None:
        self._observer(tier).cleared()
        self.events.publish()

    def _observer(self, tier: str) -> Any:
        return self.events.log.observer(tier)
