"""EventLog: what one replica tells others of the variants that it holds, tier by tier.

    observer   gives the index, or the ledger of a tier, the object that it tells its changes to
    take       gives the events to publish now
    drop       notes that they cannot be published now

A listener keeps the last `buffer_len` batches, or asks for them. Each batch tells some of what is held again, the
longest untold first, so that these batches are enough to know all that is held, however long the replica has run.
Nothing depends on a clock or on the order of a set.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chunk_cache.events.event_keys import EventKeys
from chunk_cache.index.observer import Observer

POOL = "pool"
"""The tier of the index; below it those of `tier_config.TIERS`."""

KINDS = ("stored", "removed", "cleared", "told_again")
"""Kinds of events; `told_again` is `stored` for what was told before."""

MAX_TOLD_AGAIN = 256
"""Most variants that a batch tells again; they take the scheduler half a millisecond."""

_MAX_TIERS = 8

_HELD = struct.Struct("<qqq")
"""Chunk, partition, tokens: packed, as a replica may hold millions."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change; the numbers are `EventKeys`."""

    kind: str
    """One of `KINDS`."""
    tier: str | None
    """None = all tiers, with `cleared`."""
    chunk: int = 0
    partition: int = 0
    variant: int = 0
    num_tokens: int = 0


class EventLog:
    """See the head of this file.

    Args:
        buffer_len: batches that can be asked for again.
    """

    def __init__(self, keys: EventKeys, buffer_len: int) -> None:
        assert buffer_len >= 4, f"a buffer of {buffer_len} batches"
        self._keys = keys
        self._buffer_len = buffer_len
        self._held: dict[int, bytes] = {}  # by variant * _MAX_TIERS + number of the tier
        self._turns: deque[int] = deque()  # keys of `_held`, the longest untold first; some twice, some that are gone
        self._tiers: list[str] = []
        self._changes: list[Event] = [Event("cleared", None)]  # for listeners to the process before this one
        self._num_dropped = 0  # variants still to be told again after a `drop`

    def __len__(self) -> int:
        """Number of variants that are held, once for each tier."""
        return len(self._held)

    def observer(self, tier: str, num_tokens: Callable[[int], int] = int) -> Observer:
        """The observer of one tier, which writes its events into this log.

        Args:
            num_tokens: converts a size of this tier into tokens.
        """
        if tier not in self._tiers:
            self._tiers.append(tier)
            assert len(self._tiers) <= _MAX_TIERS, f"too many tiers: {self._tiers}"
        return _TierObserver(self, self._tiers.index(tier), num_tokens)

    @property
    def has_news(self) -> bool:
        """Whether `take` has anything to tell."""
        return bool(self._changes or self._num_dropped)

    def take(self) -> list[Event]:
        """The events since the last call, then some that are told again; none if nothing has happened."""
        if not self.has_news:
            return []
        events, self._changes = self._changes, []
        # Four times as fast as the buffer turns over: variants that come and go meanwhile change the pace.
        pace = -(-4 * len(self._held) // self._buffer_len)
        stored = [one for one in events if one.kind == "stored"]
        new = {one.variant * _MAX_TIERS + i for i, name in enumerate(self._tiers) for one in stored if one.tier == name}
        num_old = len(self._held) - len(new & self._held.keys())
        num_again = min(MAX_TOLD_AGAIN, max(pace, self._num_dropped), num_old)
        while num_again > 0:
            place = self._turns.popleft()
            if place in self._held:
                self._turns.append(place)
                events.append(self._event("told_again", place, self._held[place]))
                num_again -= 1
        self._num_dropped = max(0, min(self._num_dropped - MAX_TOLD_AGAIN, num_old))
        return events

    def drop(self) -> int:
        """Forgets the events that cannot be published; since no listener would notice the gap, all is told anew.

        Returns:
            How many events.
        """
        num_dropped = len(self._changes)
        self._changes = [Event("cleared", None)]
        self._num_dropped = len(self._held)
        return num_dropped

    def _event(self, kind: str, place: int, held: bytes) -> Event:
        chunk, partition, num_tokens = _HELD.unpack(held)
        return Event(kind, self._tiers[place % _MAX_TIERS], chunk, partition, place // _MAX_TIERS, num_tokens)

    def _place(self, tier: int, key: bytes, name: str) -> int:
        return self._keys.variant(key, name) * _MAX_TIERS + tier

    def _store(self, tier: int, key: bytes, name: str, partition: bytes, num_tokens: int) -> None:
        place = self._place(tier, key, name)
        held = _HELD.pack(self._keys.chunk(partition, key), self._keys.partition(partition), num_tokens)
        self._held[place] = held
        self._turns.append(place)
        self._changes.append(self._event("stored", place, held))
        if len(self._turns) > 2 * len(self._held) + 64:
            self._keep_turns()

    def _remove(self, tier: int, key: bytes, name: str) -> None:
        place = self._place(tier, key, name)
        held = self._held.pop(place, None)
        if held is not None:
            self._changes.append(self._event("removed", place, held))

    def _clear(self, tier: int) -> None:
        self._held = {place: held for place, held in self._held.items() if place % _MAX_TIERS != tier}
        self._keep_turns()
        self._changes.append(Event("cleared", self._tiers[tier]))

    def _keep_turns(self) -> None:
        """Keeps the latest turn of each place that is held, and drops the others."""
        latest = dict.fromkeys(place for place in reversed(self._turns) if place in self._held)
        self._turns = deque(reversed(latest))


@dataclass(frozen=True, slots=True)
class _TierObserver:
    """The `Observer` of one tier."""

    log: EventLog
    tier: int
    num_tokens: Callable[[int], int]

    def stored(self, key: bytes, name: str, partition: bytes, size: int) -> None:
        self.log._store(self.tier, key, name, partition, self.num_tokens(size))

    def removed(self, key: bytes, name: str) -> None:
        self.log._remove(self.tier, key, name)

    def cleared(self) -> None:
        self.log._clear(self.tier)
