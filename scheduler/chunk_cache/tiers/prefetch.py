"""Loads that queued requests want: what to start next, and which requests need to wait no longer.

    want       a request asks for entries, until a deadline
    take       the entry to load next, oldest request first; it is under way from here on
    complete   one load is over
    poll       from the deadline on, a request that still waits is late
    votes      the states of requests as numbers, for an all-reduce MAX over the tensor-parallel ranks
    apply      what all ranks agreed on: who waits no longer leaves the queue
    cancel     a request is aborted; it leaves, and with it the loads that were not started and nobody else wants
    drain      entries that are there and that nobody wants any more: the queue gives up what was loaded for it

An entry is loaded once, however many requests want it, and stays until the last of them has left; whether its load
succeeded plays no part here. A state once reached stays: waiting turns into arrived or late (computed instead, as
Cache-Craft section 3.5 does for what has not arrived when the request is ready). Ranks see loads end at different
times, but requests leave by `cancel` and `apply` only, so the queues of all ranks hold the same requests. No wall
clock: `now` and deadlines are the caller's seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Votes: TypeAlias = npt.NDArray[np.int64]


class State(IntEnum):
    """State of a request, and its vote: of all ranks the largest counts, so all must have arrived."""

    ARRIVED = 0
    WAITING = 1
    LATE = 2


class _Step(IntEnum):
    WANTED = 0
    LOADING = 1
    ARRIVED = 2


@dataclass(eq=False, slots=True)
class _Entry:
    entry_id: bytes
    step: _Step = _Step.WANTED
    wanted_by: dict[str, _Request] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Request:
    request_id: str
    deadline: float
    entries: dict[bytes, _Entry]
    num_missing: int
    """Entries that have not arrived."""
    state: State = State.WAITING


class PrefetchQueue:
    """See the head of this file. Every call is O(requests or entries it names), `poll` O(requests), amortised."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._entries: dict[bytes, _Entry] = {}
        # (request, entry) as they were wanted, until they are looked at by `take`; some have left or been taken.
        self._pending: deque[tuple[_Request, _Entry]] = deque()
        self._max_pending = 64
        self._drained: list[bytes] = []
        self.num_loading = 0
        """Loads under way, those that nobody wants any more included."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def want(self, request_id: str, entry_ids: Iterable[bytes], now: float, deadline: float) -> None:
        """Asks for entries, in the order in which they should be loaded; one that is named twice counts once.

        An entry that has arrived for a request still here has arrived for this one too. A request that wants only
        entries that have arrived, or none, has arrived; any other is late if its deadline is over.
        """
        assert request_id not in self._requests, f"{request_id!r} is in the queue already"
        entries = {entry_id: self._entries.setdefault(entry_id, _Entry(entry_id)) for entry_id in entry_ids}
        num_missing = sum(entry.step is not _Step.ARRIVED for entry in entries.values())
        request = _Request(request_id, deadline, entries, num_missing)
        self._requests[request_id] = request
        for entry in entries.values():
            entry.wanted_by[request_id] = request
            if entry.step is _Step.WANTED:
                self._pending.append((request, entry))
        if len(self._pending) > self._max_pending:
            self._pending = deque(pair for pair in self._pending if self._is_pending(*pair))
            self._max_pending = 2 * len(self._pending) + 64
        if not num_missing:
            request.state = State.ARRIVED
        self._check_deadline(request, now)

    def take(self) -> bytes | None:
        """The entry to load now, of the oldest request that still waits; None without any."""
        while self._pending:
            request, entry = self._pending.popleft()
            if self._is_pending(request, entry):
                entry.step = _Step.LOADING
                self.num_loading += 1
                return entry.entry_id
        return None

    def complete(self, entry_id: bytes) -> None:
        """Notes that one load is over. An entry that nobody wants any more is drained at once."""
        entry = self._entries.get(entry_id)
        assert entry is not None, f"{entry_id!r} is not wanted"
        assert entry.step is _Step.LOADING, f"{entry_id!r} is not being loaded, but {entry.step}"
        self.num_loading -= 1
        entry.step = _Step.ARRIVED
        for request in entry.wanted_by.values():
            request.num_missing -= 1
            if request.state is State.WAITING and not request.num_missing:
                request.state = State.ARRIVED
        if not entry.wanted_by:
            self._forget(entry)

    def cancel(self, request_id: str) -> bool:
        """Aborts a request; False if it is not here. Loads under way go on, and are dropped when they end."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._leave(request)
        return True

    def poll(self, now: float) -> None:
        """Requests whose deadline is over are late from here on."""
        for request in self._requests.values():
            self._check_deadline(request, now)

    def state_of(self, request_id: str) -> State:
        """State of a request that is here, as of the last `poll`."""
        return self._requests[request_id].state

    def votes(self, request_ids: Sequence[str]) -> Votes:
        """This rank's states of these requests as of the last `poll`, `[len(request_ids)]`; all must be here."""
        return np.array([self.state_of(request_id) for request_id in request_ids], dtype=np.int64)

    def apply(self, request_ids: Sequence[str], votes: Votes) -> list[str]:
        """Removes and returns, in the order given, the requests that wait no longer by the largest vote of all ranks.

        Ranks agree on who waits. Why a request waits no longer may differ: it is late on one rank, and has arrived on
        another.
        """
        assert len(votes) == len(request_ids), f"{len(votes)} votes on {len(request_ids)} requests"
        left = []
        for request_id, own, agreed in zip(request_ids, self.votes(request_ids).tolist(), votes.tolist(), strict=True):
            assert own <= agreed <= State.LATE, f"{request_id!r}: {agreed} is not the largest, {own} is ours"
            if agreed != State.WAITING:
                self._leave(self._requests[request_id])
                left.append(request_id)
        return left

    def drain(self) -> tuple[bytes, ...]:
        """Arrived entries that have left the queue since the last call; an id may be there again by now."""
        drained, self._drained = tuple(self._drained), []
        return drained

    def check_integrity(self) -> None:
        """Raises an `AssertionError` where the parts contradict each other."""
        pending = {(id(request), id(entry)) for request, entry in self._pending}
        for entry_id, entry in self._entries.items():
            assert entry.entry_id == entry_id, f"{entry.entry_id!r} is listed as {entry_id!r}"
            assert entry.wanted_by or entry.step is _Step.LOADING, f"nobody wants {entry_id!r}, {entry.step}"
            for request_id, request in entry.wanted_by.items():
                assert self._requests.get(request_id) is request, f"{request_id!r} wants {entry_id!r}, but has left"
                assert request.entries[entry_id] is entry, f"{request_id!r} wants another {entry_id!r}"
        for request_id, request in self._requests.items():
            steps = [entry.step for entry in request.entries.values()]
            assert all(request_id in entry.wanted_by for entry in request.entries.values()), f"{request_id!r}"
            assert request.num_missing == len(steps) - steps.count(_Step.ARRIVED), f"{request_id!r} misses others"
            assert request.num_missing or request.state is not State.WAITING, f"{request_id!r} waits for nothing"
            assert not request.num_missing or request.state is not State.ARRIVED, f"{request_id!r} has not arrived"
            for entry in request.entries.values():
                is_listed = (id(request), id(entry)) in pending
                assert is_listed or not self._is_pending(request, entry), f"{entry.entry_id!r} is never taken"
        num_loading = sum(entry.step is _Step.LOADING for entry in self._entries.values())
        assert self.num_loading == num_loading, f"{self.num_loading} loads, but {num_loading}"

    def _is_pending(self, request: _Request, entry: _Entry) -> bool:
        is_here = self._requests.get(request.request_id) is request
        return is_here and request.state is State.WAITING and entry.step is _Step.WANTED

    def _check_deadline(self, request: _Request, now: float) -> None:
        if request.state is State.WAITING and now >= request.deadline:
            request.state = State.LATE

    def _leave(self, request: _Request) -> None:
        del self._requests[request.request_id]
        for entry in request.entries.values():
            del entry.wanted_by[request.request_id]
            if not entry.wanted_by and entry.step is not _Step.LOADING:
                self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.entry_id]
        if entry.step is _Step.ARRIVED:
            self._drained.append(entry.entry_id)
