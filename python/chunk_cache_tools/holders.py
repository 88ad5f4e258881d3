"""Holders: which replica holds which chunks, for clients and routers of several replicas.

Verbs: `who_holds`, `wait` (until all replicas are known), `close`. A thread subscribes to the events that servers with
`events` in `--chunk-cache-config` publish. Needs neither torch nor SGLang.

Promises: a replica that does not answer is not known, and is left out of the result. At the start, and after a gap in
the sequence numbers, `Holders` asks the replica for the missing events; if they are lost, or the replica has been
restarted, it forgets what it knew from before. Without the salt of the servers no text can be looked up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq

from chunk_cache.events.event_keys import EventKeys
from chunk_cache.events.event_messages import END_SEQ, MEDIA, TOPIC, AllBlocksCleared, Batch, BlockStored, read_batch
from chunk_cache.keys import Partition, chunk_key

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds without an event after which a replica is asked for events that were missed."""

LOST_S = 5.0
"""Seconds without an event or an answer after which a replica is not known any more."""

MAX_AHEAD = 10_000
"""Most batches behind a gap that are kept until it is closed; a replica has no more to send again."""

_PLACES = list(MEDIA.values())

Chunk: TypeAlias = str | bytes | Sequence[int]
"""Text, `chunk_key` or token ids."""


@dataclass(frozen=True)
class Source:
    """Addresses of a replica's events: `endpoint` and `replay_endpoint` of its `events`, as a client reaches them."""

    endpoint: str
    replay_endpoint: str


class Holders:
    """See the head of this file.

    Args:
        replicas: sources by name; the name is, for example, the address by which a gateway knows the replica.
        salt: salt of the servers.
        encode: turns a passage into its token ids as a chunk (`encode_chunk`); None = only keys and ids are looked up.

    Example:
        >>> source = Source("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
        >>> with Holders({"http://10.0.0.1:30000": source}, salt="secret") as holders:
        ...     holders.who_holds([b"0123456789abcdef"])
        {}
    """

    def __init__(
        self,
        replicas: Mapping[str, Source],
        salt: str,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self._keys = EventKeys(salt)
        self._encode = encode
        self._changed = threading.Condition()  # guards what followers know
        self._is_closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._followers = {name: _Follower(self._context, source) for name, source in replicas.items()}
        self._thread = threading.Thread(target=self._follow, name="chunk-holders", daemon=True)
        self._thread.start()

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def who_holds(
        self,
        chunks: Iterable[Chunk],
        partition: Partition = Partition(),  # noqa: B008  # frozen
        tiers: Iterable[str] = tuple(MEDIA),
    ) -> dict[str, int]:
        """Number of tokens of these chunks that each known replica holds, 0 if it holds none.

        Args:
            chunks: a chunk that is named twice counts once.
            partition: `extra_key` and `cache_salt` of the request.
            tiers: places that count, of `pool`, `host`, `disk`, `remote`.
        """
        tenant = partition.key
        hashes = {self._keys.chunk(tenant, self._key(chunk, partition)) for chunk in chunks}
        places = frozenset(_PLACES.index(MEDIA[tier]) for tier in tiers)
        with self._changed:
            return {
                name: sum(one.held.num_tokens(chunk, places) for chunk in hashes)
                for name, one in self._followers.items()
                if one.is_known
            }

    def wait(self, timeout_s: float) -> bool:
        """Waits until all replicas are known, at most `timeout_s`; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: all(one.is_known for one in self._followers.values()), timeout_s)

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._is_closed = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _key(self, chunk: Chunk, partition: Partition) -> bytes:
        if isinstance(chunk, bytes):
            return chunk
        if isinstance(chunk, str):
            if self._encode is None:
                raise ValueError("chunks: a text, and Holders has no encode; give it one, or keys or token ids here")
            chunk = self._encode(chunk)
        return chunk_key(partition, chunk)

    def _follow(self) -> None:
        poller = zmq.Poller()
        for one in self._followers.values():
            poller.register(one.live, zmq.POLLIN)
            poller.register(one.replay, zmq.POLLIN)
        while not self._is_closed:
            poller.poll(timeout=100)
            for one in self._followers.values():
                with self._changed:
                    one.read(time.monotonic())
                    self._changed.notify_all()


class _Held:
    """What one replica holds: for each chunk its number of tokens, then one number per variant and place it lies in."""

    def __init__(self) -> None:
        self._chunks: dict[int, tuple[int, ...]] = {}

    def num_tokens(self, chunk: int, places: frozenset[int]) -> int:
        found = self._chunks.get(chunk)
        return found[0] if found and any(one % len(_PLACES) in places for one in found[1:]) else 0

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            if event.medium is not None and event.medium not in _PLACES:  # a tier that a newer server has
                continue
            if isinstance(event, AllBlocksCleared):
                self.clear(event.medium)
                continue
            place = event.variant * len(_PLACES) + _PLACES.index(event.medium)
            for chunk in event.block_hashes:
                known = tuple(one for one in self._chunks.pop(chunk, ())[1:] if one != place)
                if isinstance(event, BlockStored):
                    known += (place,)
                if known:
                    self._chunks[chunk] = (event.block_size, *known)

    def clear(self, medium: str | None = None) -> None:
        """Forgets the variants in one medium of `MEDIA`; None = in all."""
        gone = range(len(_PLACES)) if medium is None else (_PLACES.index(medium),)
        left = {
            chunk: (num_tokens, *known)
            for chunk, (num_tokens, *places) in self._chunks.items()
            if (known := [one for one in places if one % len(_PLACES) not in gone])
        }
        self._chunks = left


class _Follower:
    """The state of one replica, kept up to date by its events.

    Batches are applied in the order of their numbers. If one is missing, live ones wait in `_ahead`, and a replay of
    the missing ones is asked for; so it is at the start, and if nothing was heard for a while.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: Source) -> None:
        self.held = _Held()
        self.is_known = False
        self.live = context.socket(zmq.SUB)
        self.live.connect(source.endpoint)
        self.live.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.replay = context.socket(zmq.DEALER)
        self.replay.setsockopt(zmq.IMMEDIATE, 1)  # queues no request for a replica that is not there
        self.replay.connect(source.replay_endpoint)
        self._endpoint = source.endpoint
        self._heard_at = time.monotonic()
        self._instance: str | None = None
        """Server instance that the sequence numbers belong to; None = no batch was applied yet."""
        self._next = 0
        """Number of the next batch to apply."""
        self._ahead: dict[int, Batch] = {}
        """Live batches behind a gap, by sequence number."""
        self._replay_at: float | None = None
        """Time of the replay request, or of the last batch of its answer; None = no replay is in progress."""
        self._replay_begin = 0
        """Number of the first batch that it asks for."""
        self._has_replayed = False
        """Whether it was answered with a batch."""

    def read(self, now: float) -> None:
        """Takes what has arrived, and asks for what is missing."""
        for seq, batch in self._arrived(self.replay, now):
            self._replay_at = now
            self._take_replayed(seq, batch)
        for seq, batch in self._arrived(self.live, now):
            self._take_live(seq, batch)
        if self.is_known and now - self._heard_at > LOST_S:
            logger.warning("Chunk holders: %s does not answer", self._endpoint)
            self._forget()
        is_due = not self.is_known or self._ahead or now - self._heard_at > CHECK_S
        if is_due and (self._replay_at is None or now - self._replay_at > LOST_S):
            self._ask(now)

    def _arrived(self, socket: zmq.Socket[bytes], now: float) -> Iterator[tuple[int, Batch]]:
        """Yields numbers and batches that have arrived; the first of a new server has the old one forgotten."""
        for seq, payload in _messages(socket):
            self._heard_at = now
            if seq == END_SEQ:
                self._end_replay()
                continue
            try:
                batch = read_batch(payload)
            except msgspec.DecodeError as error:
                logger.warning("Chunk holders: %s sends what is not of ours: %s", self._endpoint, error)
                continue
            if self._instance not in (None, batch.instance):
                self._forget()
            yield int.from_bytes(seq, "big"), batch

    def _take_live(self, seq: int, batch: Batch) -> None:
        if self._instance is None and seq == 0:
            self._instance = batch.instance
        if seq == self._next and batch.instance == self._instance:
            self._apply(batch)
        elif seq >= self._next and len(self._ahead) < MAX_AHEAD:
            self._ahead[seq] = batch

    def _take_replayed(self, seq: int, batch: Batch) -> None:
        self._has_replayed = True
        if self._replay_begin > self._next:
            return  # the answer to a request that counted by the numbers of an earlier server
        if self._instance is None or seq > self._next:  # the batches before `seq` are lost
            self.held.clear()
            self._instance, self._next = batch.instance, seq
        if seq == self._next:
            self._apply(batch)

    def _apply(self, batch: Batch) -> None:
        following: Batch | None = batch
        while following is not None and following.instance == self._instance:
            self.held.apply(following)
            self._next += 1
            following = self._ahead.pop(self._next, None)

    def _end_replay(self) -> None:
        """Ends a replay: everything that was asked for has arrived."""
        self._replay_at = None
        self._ahead = {seq: batch for seq, batch in self._ahead.items() if seq > self._next}
        if self._replay_begin < self._next and not self._has_replayed:
            self._forget()  # the server does not have the batch it has sent before: it was restarted
        elif self._replay_begin <= self._next:
            self.is_known = True

    def _forget(self) -> None:
        self.held.clear()
        self.is_known = False
        self._instance, self._next = None, 0
        self._ahead.clear()

    def _ask(self, now: float) -> None:
        """Asks for all batches from the last applied one on; that one tells whether it is still the same server."""
        begin = max(0, self._next - 1)
        with suppress(zmq.Again):  # the replica is not there
            self.replay.send_multipart((b"", begin.to_bytes(8, "big")), zmq.NOBLOCK)
            self._replay_at, self._replay_begin, self._has_replayed = now, begin, False


def _messages(socket: zmq.Socket[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Sequence numbers and payloads that have arrived, some of them if there are many."""
    with suppress(zmq.Again):
        for _ in range(1000):
            frames = socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) > 1:  # else somebody else's
                yield frames[-2], frames[-1]
