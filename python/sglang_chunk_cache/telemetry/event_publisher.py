"""EventPublisher: publishes which chunks this replica holds, by SGLang's publisher of KV events.

Verb: `publish` (what has changed since the last call, as one batch). Promise: it waits for nobody. If the queue of the
publisher's thread is full, the batch is dropped and counted, and later all that is held is published anew.
"""

from __future__ import annotations

import time
from collections import Counter

import zmq
from sglang.srt.disaggregation.kv_events import ZmqEventPublisher

from chunk_cache.events.event_keys import EventKeys
from chunk_cache.events.event_log import EventLog
from chunk_cache.events.event_messages import TOPIC, Batch, message_of
from chunk_cache.options.event_config import EventConfig
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics

BUFFER_LEN = 10_000
"""Batches that a subscriber can ask for again."""

MAX_QUEUED = 1000
"""Batches that wait for the publisher's thread."""


class EventPublisher:
    """See the head of this file.

    Args:
        instance: name of the server.
        dp_rank: number of this replica of the server.

    Raises:
        ValueError: an address is taken, or cannot be one of ours; the message names it.
    """

    def __init__(self, config: EventConfig, metrics: ChunkMetrics, *, instance: str, dp_rank: int) -> None:
        self.log = EventLog(EventKeys(config.salt), BUFFER_LEN)
        self._metrics = metrics
        self._instance = instance
        self._dp_rank = dp_rank
        try:
            self._publisher = ZmqEventPublisher(
                dp_rank,
                endpoint=config.endpoint,
                replay_endpoint=config.replay_endpoint,
                buffer_steps=BUFFER_LEN,
                max_queue_size=MAX_QUEUED,
                topic=TOPIC,
                bind=True,
            )
        except zmq.ZMQError as error:
            raise ValueError(f"{error}; give addresses of this machine that are free") from None  # it names the address

    def publish(self) -> None:
        """Publishes everything that has changed since the last call, in one batch; nothing if nothing has."""
        if not self.log.has_news:
            return
        if self._publisher._event_queue.full():  # `publish` would wait; nobody else puts, so it does not wait below
            self._metrics.add("events", "dropped", num=self.log.drop())
            return
        events = self.log.take()
        self._publisher.publish(Batch(time.time(), list(map(message_of, events)), self._dp_rank, self._instance))
        for kind, num in Counter(event.kind for event in events).items():
            self._metrics.add("events", kind, num=num)
