"""Loads that queued requests want: what to start next, and what has become of each request.

    want       a request asks for entries, until a deadline
    take       what to start next, oldest request first; these loads are under way from here on
    complete   one load is over
    poll       the state of every request here; from the deadline on, one that still waits is late
    votes      the same as numbers, for an all-reduce MAX over the tensor-parallel ranks
    apply      what all ranks agreed on: who is done leaves the queue
    cancel     a request is aborted; it leaves, and with it the loads that were not started and nobody else wants
    drain      arrived entries that nobody wants any more: the queue gives up what was loaded for it

An entry is loaded once, however many requests want it, and stays until the last of them has left. A state once reached
stays: waiting turns into arrived, failed or late (computed instead, as Cache-Craft section 3.5 does for what has not
arrived when the request is ready). Ranks see loads end at different times, but requests leave by `cancel` and `apply`
only, so the queues of all ranks hold the same requests. No wall clock: `now` and deadlines are the caller's seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Votes: TypeAlias = npt.NDArray[np.int8]


class State(StrEnum):
    WAITING = "waiting"
    ARRIVED = "arrived"
    FAILED = "failed"
    LATE = "late"


VOTES = {State.ARRIVED: 0, State.WAITING: 1, State.FAILED: 2, State.LATE: 2}
"""The largest of all ranks counts: all must have arrived, and one that fails fails all."""

OTHER_RANK = "other_rank"
"""The reason of a request that failed or was late elsewhere, but not here."""


class Progress(NamedTuple):
    """What has become of a request; `reason` where it failed, else None."""

    request_id: str
    state: State
    reason: str | None = None


class _Step(StrEnum):
    WANTED = "wanted"
    LOADING = "loading"
    ARRIVED = "arrived"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class _Entry:
    entry_id: str
    step: _Step = _Step.WANTED
    reason: str | None = None
    wanted_by: dict[str, _Request] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Request:
    request_id: str
    deadline: float
    entries: dict[str, _Entry]
    num_missing: int
    """Entries that have not arrived."""
    state: State = State.WAITING
    reason: str | None = None

    def progress(self) -> Progress:
        return Progress(self.request_id, self.state, self.reason)


class PrefetchQueue:
    """See the head of this file. Every call is O(requests or entries it names), `poll` O(requests), amortised."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._entries: dict[str, _Entry] = {}
        # (request, entry) as they were wanted, until they are looked at by `take`; some have left or been taken.
        self._pending: deque[tuple[_Request, _Entry]] = deque()
        self._max_pending = 64
        self._drained: list[str] = []
        self._num_loading = 0

    def __len__(self) -> int:
        """Requests."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_loading(self) -> int:
        """Loads under way, those that nobody wants any more included."""
        return self._num_loading

    def want(self, request_id: str, entry_ids: Iterable[str], now: float, deadline: float = math.inf) -> Progress:
        """Ask for entries, in the order in which they should be loaded; named twice counts once.

        An entry that has arrived or failed for a request that is still here has done so for this one, too. A request
        that wants nothing, or what is all there, has arrived; else one whose deadline is over is late.
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
            elif entry.step is _Step.FAILED and request.state is State.WAITING:
                request.state, request.reason = State.FAILED, entry.reason
        if len(self._pending) > self._max_pending:
            self._pending = deque(pair for pair in self._pending if self._is_pending(*pair))
            self._max_pending = 2 * len(self._pending) + 64
        if not num_missing:
            request.state = State.ARRIVED
        self._check_deadline(request, now)
        return request.progress()

    def take(self, max_loads: int) -> tuple[str, ...]:
        """At most `max_loads` entries to start now, oldest request first; nothing for who has failed or is late."""
        taken: list[str] = []
        while self._pending and len(taken) < max_loads:
            request, entry = self._pending.popleft()
            if self._is_pending(request, entry):
                entry.step = _Step.LOADING
                taken.append(entry.entry_id)
        self._num_loading += len(taken)
        return tuple(taken)

    def complete(self, entry_id: str, ok: bool, reason: str | None = None) -> None:
        """One load is over; `reason` says why where it is not `ok`. What nobody wants any more is drained at once."""
        entry = self._entries.get(entry_id)
        assert entry is not None, f"{entry_id!r} is not wanted"
        assert entry.step is _Step.LOADING, f"{entry_id!r} is not being loaded, but {entry.step}"
        assert ok or reason, f"{entry_id!r} failed for no reason"
        self._num_loading -= 1
        entry.step, entry.reason = (_Step.ARRIVED, None) if ok else (_Step.FAILED, reason)
        for request in entry.wanted_by.values():
            request.num_missing -= ok
            if request.state is State.WAITING and not ok:
                request.state, request.reason = State.FAILED, reason
            elif request.state is State.WAITING and not request.num_missing:
                request.state = State.ARRIVED
        if not entry.wanted_by:
            self._forget(entry)

    def cancel(self, request_id: str) -> bool:
        """Abort a request; False where it is not here. Loads under way go on, and are dropped when they end."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._leave(request)
        return True

    def poll(self, now: float) -> list[Progress]:
        """All requests, oldest first."""
        for request in self._requests.values():
            self._check_deadline(request, now)
        return [request.progress() for request in self._requests.values()]

    def votes(self, request_ids: Sequence[str]) -> Votes:
        """This rank's `VOTES` as of the last `poll`, `[len(request_ids)]` int8; all must be here."""
        return np.array([VOTES[self._requests[request_id].state] for request_id in request_ids], dtype=np.int8)

    def apply(self, request_ids: Sequence[str], votes: Votes) -> list[Progress]:
        """The outcome by the largest vote of all ranks, in the order given; those that do not wait leave the queue.

        A request that went wrong elsewhere only has failed, for `OTHER_RANK`, whatever it is here; one that waits
        elsewhere waits. So ranks agree on who arrived, waits and is computed; why it is computed may differ.
        """
        assert len(votes) == len(request_ids), f"{len(votes)} votes on {len(request_ids)} requests"
        outcome = []
        for request_id, own, agreed in zip(request_ids, self.votes(request_ids).tolist(), votes.tolist(), strict=True):
            assert own <= agreed <= 2, f"{request_id!r}: {agreed} is not the largest, {own} is ours"
            request = self._requests[request_id]
            if agreed == VOTES[State.WAITING]:
                outcome.append(Progress(request_id, State.WAITING))
                continue
            outcome.append(request.progress() if own == agreed else Progress(request_id, State.FAILED, OTHER_RANK))
            self._leave(request)
        return outcome

    def drain(self) -> tuple[str, ...]:
        """Arrived entries that have left the queue since the last call; an id may be there again by now."""
        drained, self._drained = tuple(self._drained), []
        return drained

    def check_integrity(self) -> None:
        """Raises an `AssertionError` where the parts contradict each other."""
        pending = {(id(request), id(entry)) for request, entry in self._pending}
        for entry_id, entry in self._entries.items():
            assert entry.entry_id == entry_id, f"{entry.entry_id!r} is listed as {entry_id!r}"
            assert entry.wanted_by or entry.step is _Step.LOADING, f"nobody wants {entry_id!r}, {entry.step}"
            assert (entry.reason is not None) == (entry.step is _Step.FAILED), f"{entry_id!r}: {entry.reason}"
            for request_id, request in entry.wanted_by.items():
                assert self._requests.get(request_id) is request, f"{request_id!r} wants {entry_id!r}, but has left"
                assert request.entries[entry_id] is entry, f"{request_id!r} wants another {entry_id!r}"
        for request_id, request in self._requests.items():
            steps = [entry.step for entry in request.entries.values()]
            assert all(request_id in entry.wanted_by for entry in request.entries.values()), f"{request_id!r}"
            assert request.num_missing == len(steps) - steps.count(_Step.ARRIVED), f"{request_id!r} misses others"
            assert (request.reason is not None) == (request.state is State.FAILED), f"{request.progress()}"
            assert request.num_missing or request.state is not State.WAITING, f"{request_id!r} waits for nothing"
            assert not request.num_missing or request.state is not State.ARRIVED, f"{request_id!r} has not arrived"
            assert _Step.FAILED not in steps or request.state in (State.FAILED, State.LATE), f"{request.progress()}"
            for entry in request.entries.values():
                is_listed = (id(request), id(entry)) in pending
                assert is_listed or not self._is_pending(request, entry), f"{entry.entry_id!r} is never taken"
        num_loading = sum(entry.step is _Step.LOADING for entry in self._entries.values())
        assert self._num_loading == num_loading, f"{self._num_loading} loads, but {num_loading}"

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
