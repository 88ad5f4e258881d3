"""What leaves the process: SGLang's framing, no token id, and never a wait."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation import kv_events as stock

from chunk_cache.events.event_keys import EventKeys
from chunk_cache.events.event_log import KINDS
from chunk_cache.events.event_messages import END_SEQ, Batch, read_batch
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.event_config import EventConfig
from sglang_chunk_cache.telemetry import event_publisher as events
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics
from sglang_chunk_cache.telemetry.event_publisher import EventPublisher
from unit.events.replica import SALT, TOKENS_PER_CHUNK, Replica, tokens

TIMEOUT_MS = 10_000
TENANT = Partition(cache_salt="acme")


@pytest.fixture
def listen() -> Iterator[Callable[[Any], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(replica: Replica) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.connect(replica.source.replay_endpoint)
        return socket

    yield connect
    context.destroy(linger=0)


def replayed(socket: zmq.Socket[bytes], start: int = 0, until: int | None = None) -> list[tuple[int, bytes]]:
    """Numbers and payloads; asked for again until a batch is there, where one is named."""
    while True:
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while (message := socket.recv_multipart())[-2] != END_SEQ:
            assert message[:-2] == [b"", b"chunks"]
            found.append((int.from_bytes(message[-2], "big"), message[-1]))
        if until is None or (found and found[-1][0] >= until):
            return found


def test_sglang_reads_it(replica, listen) -> None:
    one = replica("a")
    one.store([0], partition=TENANT)
    one.store([1], tier="remote")
    one.remove([1], tier="remote")
    one.clear()
    keys = EventKeys(SALT)
    chunk = keys.chunk(TENANT.key, chunk_key(TENANT, tokens(0)))
    payloads = [payload for _, payload in replayed(listen(one), until=4)]
    batches = [msgspec.msgpack.decode(payload, type=stock.KVEventBatch) for payload in payloads]
    assert [batch.attn_dp_rank for batch in batches] == [0] * 5
    first = [batch.events[0] for batch in batches]
    assert first == [
        stock.AllBlocksCleared(),
        stock.BlockStored([chunk], None, [], TOKENS_PER_CHUNK, None, medium=stock.StorageMedium.GPU.value),
        stock.BlockStored(first[2].block_hashes, None, [], TOKENS_PER_CHUNK, None, medium="EXTERNAL"),
        stock.BlockRemoved(first[2].block_hashes, medium=stock.StorageMedium.EXTERNAL.value),
        stock.AllBlocksCleared(),
    ]
    ours = [read_batch(payload) for payload in payloads]
    assert {batch.instance for batch in ours} == {"a-1"}
    assert ours[1].events[0].partition == keys.partition(TENANT.key)
    assert ours[2].events[0].variant == ours[3].events[0].variant != ours[1].events[0].variant


def test_neither_tokens_nor_keys_nor_names_leave(replica, listen) -> None:
    one = replica("a")
    one.store(range(20), partition=TENANT, name="variant-name")
    secrets = [TENANT.key, b"acme", SALT.encode(), b"variant-name"]
    for number in range(20):
        secrets += [chunk_key(TENANT, tokens(number)), chunk_key(Partition(), tokens(number))]
        secrets += [token.to_bytes(4, order) for token in tokens(number) for order in ("big", "little")]
    for _, payload in replayed(listen(one), until=1):
        assert not [secret for secret in secrets if secret in payload]
        numbers = {int(digits) for digits in re.findall(r"\d+", str(msgspec.msgpack.decode(payload)))}
        assert not numbers & {token for number in range(20) for token in tokens(number)}


def test_nothing_is_sent_where_nothing_has_happened(replica, listen) -> None:
    one = replica("a")
    for _ in range(5):
        one.events.publish()
    one.store([0])
    assert [seq for seq, _ in replayed(listen(one), until=1)] == [0, 1]
    assert [seq for seq, _ in replayed(listen(one), start=1)] == [1]
    assert replayed(listen(one), start=2) == []


class Counted(ChunkMetrics):
    """Counts without Prometheus."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.events = dict.fromkeys((*KINDS, "dropped"), 0)

    def add(self, name: str, *labels: str, num: float = 1) -> None:
        assert name == "events"
        self.events[labels[0]] += int(num)


def test_a_full_queue_drops_counts_and_tells_anew(tmp_path: Path, monkeypatch, listen) -> None:
    monkeypatch.setattr(events, "MAX_QUEUED", 2)
    one, metrics = Replica(tmp_path, "a"), Counted()
    one.stop()
    config = EventConfig(one.source.endpoint, SALT, one.source.replay_endpoint)
    one.events = EventPublisher(config, metrics, instance="b", dp_rank=0)
    queue = one.events._publisher._event_queue
    unsendable = Batch(0.0, [object()], None, "b")  # type: ignore[list-item]  # each stops the thread for 0.1 s
    while not queue.full():
        one.events._publisher.publish(unsendable)
    one.store(range(10))
    assert metrics.events == {"stored": 0, "removed": 0, "cleared": 0, "told_again": 0, "dropped": 11}
    while queue.full():
        time.sleep(0.01)
    one.store([10])
    assert metrics.events == {"stored": 1, "removed": 0, "cleared": 1, "told_again": 10, "dropped": 11}
    last = read_batch(replayed(listen(one), until=2)[-1][1])
    assert [type(event).__name__ for event in last.events] == ["AllBlocksCleared"] + ["BlockStored"] * 11
    one.stop()


def test_an_address_that_is_taken() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    config = EventConfig(f"tcp://127.0.0.1:{port}", SALT)
    with pytest.raises(ValueError, match=rf"already in use .*127.0.0.1:{port}.*; give addresses of this machine"):
        EventPublisher(config, ChunkMetrics(enabled=False), instance="c", dp_rank=0)
    context.destroy(linger=0)
