"""Prefetching: its promises one by one, and a state machine of two ranks against a model of plain lists."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunk_cache.tiers.prefetch import PrefetchQueue, State

ARRIVED, WAITING, LATE = State


def want(
    queue: PrefetchQueue, request_id: str, *entry_ids: bytes, now: float = 0.0, deadline: float = math.inf
) -> State:
    queue.want(request_id, entry_ids, now, deadline)
    return queue.state_of(request_id)


def take(queue: PrefetchQueue, num: int) -> list[bytes]:
    """At most so many."""
    return [entry_id for _ in range(num) if (entry_id := queue.take()) is not None]


def test_one_load_serves_several_requests() -> None:
    queue = PrefetchQueue()
    assert want(queue, "r", b"a", b"b") is WAITING
    assert want(queue, "s", b"b", b"c", b"b") is WAITING
    assert take(queue, 2) == [b"a", b"b"]
    assert (queue.take(), queue.take(), queue.num_loading) == (b"c", None, 3)
    queue.complete(b"b")
    queue.complete(b"c")
    assert (queue.state_of("r"), queue.state_of("s")) == (WAITING, ARRIVED)
    assert queue.votes(["s", "r"]).tolist() == [0, 1]
    queue.complete(b"a")
    assert queue.votes(["s", "r"]).tolist() == [0, 0]
    assert queue.votes(["s", "r"]).dtype == np.int64
    queue.check_integrity()


def test_oldest_request_first_even_if_a_younger_wanted_more() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"c")
    want(queue, "s", b"a", b"c")
    want(queue, "t", b"b")
    assert queue.cancel("r")
    assert take(queue, 3) == [b"a", b"c", b"b"]


def test_arrived_entries_count_for_newcomers() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a")
    queue.take()
    queue.complete(b"a")
    assert want(queue, "t", b"a") is ARRIVED
    assert want(queue, "u", b"a", b"b") is WAITING
    queue.check_integrity()


def test_nothing_wanted_has_arrived_even_after_the_deadline() -> None:
    assert want(PrefetchQueue(), "r", now=5.0, deadline=1.0) is ARRIVED
    assert want(PrefetchQueue(), "r", b"a", now=5.0, deadline=5.0) is LATE


def test_late_stays_late_and_arrived_stays_arrived() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a", deadline=2.0)
    want(queue, "s", b"b", deadline=2.0)
    take(queue, 2)
    queue.complete(b"b")
    queue.poll(1.9)
    assert queue.votes("rs").tolist() == [WAITING, ARRIVED]
    queue.poll(2.0)
    assert queue.votes("rs").tolist() == [LATE, ARRIVED]
    queue.complete(b"a")
    queue.poll(0.0)
    assert queue.state_of("r") is LATE


def test_nothing_is_taken_for_who_is_late() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a", deadline=1.0)
    queue.poll(1.0)
    assert queue.take() is None


def test_cancelled_loads_are_dropped_unless_started_or_wanted() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a", b"b", b"c")
    want(queue, "s", b"c")
    assert queue.take() == b"a"
    assert queue.cancel("r")
    assert not queue.cancel("r")
    assert take(queue, 5) == [b"c"]
    queue.complete(b"a")
    assert (queue.drain(), queue.drain()) == ((b"a",), ())
    queue.complete(b"c")
    assert queue.cancel("s")
    assert (queue.drain(), len(queue), queue.num_loading) == ((b"c",), 0, 0)
    queue.check_integrity()


def test_load_under_way_is_joined_after_its_request_was_cancelled() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a")
    queue.take()
    queue.cancel("r")
    want(queue, "r", b"a", now=1.0)
    assert queue.take() is None
    queue.complete(b"a")
    assert queue.state_of("r") is ARRIVED
    assert queue.drain() == ()


def test_agreed_outcome() -> None:
    queue = PrefetchQueue()
    for request_id in "rstuv":
        want(queue, request_id, request_id.upper().encode(), deadline=1.0 if request_id == "v" else math.inf)
    take(queue, 5)
    for entry_id in (b"R", b"S", b"T"):
        queue.complete(entry_id)
    queue.poll(1.0)
    ids = ["v", "r", "s", "t", "u"]
    assert queue.votes(ids).tolist() == [LATE, ARRIVED, ARRIVED, ARRIVED, WAITING]
    assert queue.apply(ids, np.array([LATE, ARRIVED, WAITING, LATE, LATE])) == ["v", "r", "t", "u"]
    assert "s" in queue
    assert len(queue) == 1
    assert queue.drain() == (b"R", b"T")
    queue.check_integrity()


def test_what_cannot_happen() -> None:
    queue = PrefetchQueue()
    want(queue, "r", b"a")
    for misuse in (
        lambda: want(queue, "r"),
        lambda: queue.complete(b"a"),
        lambda: queue.complete(b"b"),
        lambda: queue.apply(["r"], np.array([0])),
        lambda: queue.apply(["r"], np.array([], dtype=np.int64)),
    ):
        with pytest.raises(AssertionError):
            misuse()


def test_pending_loads_stay_bounded() -> None:
    queue = PrefetchQueue()
    for i in range(1000):
        want(queue, f"r{i}", b"e%d" % i, b"f%d" % i)
        queue.cancel(f"r{i}")
    assert len(queue._pending) <= 66


@dataclass
class Request:
    request_id: str
    entry_ids: list[bytes]
    deadline: float
    state: State = WAITING


@dataclass
class Model:
    """One rank, by scanning lists."""

    requests: list[Request] = field(default_factory=list)
    loading: list[bytes] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    drained: list[bytes] = field(default_factory=list)

    def wanted(self) -> list[bytes]:
        return [e for r in self.requests for e in r.entry_ids]

    def settle(self, now: float | None = None) -> None:
        """Waiting requests change; what nobody wants goes."""
        for r in self.requests:
            if r.state is not WAITING:
                continue
            if all(e in self.arrived for e in r.entry_ids):
                r.state = ARRIVED
            elif now is not None and now >= r.deadline:
                r.state = LATE
        self.drained += [e for e in self.arrived if e not in self.wanted()]
        self.arrived = [e for e in self.arrived if e in self.wanted()]

    def take(self) -> bytes | None:
        known = self.loading + self.arrived
        new = [e for r in self.requests if r.state is WAITING for e in r.entry_ids if e not in known]
        self.loading += new[:1]
        return new[0] if new else None


REQUESTS = st.sampled_from("rstuv")


class PrefetchMachine(RuleBasedStateMachine):
    """Two ranks with the same requests; loads start and end on each by itself."""

    @initialize()
    def start(self) -> None:
        self.queues = [PrefetchQueue(), PrefetchQueue()]
        self.models = [Model(), Model()]
        self.now = 0.0

    @rule(
        request_id=REQUESTS,
        entry_ids=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=3),
        wait=st.integers(0, 3),
    )
    def want(self, request_id: str, entry_ids: list[bytes], wait: int) -> None:
        if request_id in self.queues[0]:
            return
        for queue, model in zip(self.queues, self.models, strict=True):
            queue.want(request_id, entry_ids, self.now, self.now + wait)
            request = Request(request_id, list(dict.fromkeys(entry_ids)), self.now + wait)
            others, model.requests = model.requests, [request]  # its deadline is looked at, that of others is not
            arrived = model.arrived
            model.settle(self.now)
            model.drained = [e for e in model.drained if e not in arrived]
            model.arrived, model.requests = arrived, [*others, request]
            assert queue.state_of(request_id) is request.state

    @rule(rank=st.integers(0, 1))
    def take(self, rank: int) -> None:
        assert self.queues[rank].take() == self.models[rank].take()

    @precondition(lambda self: any(model.loading for model in self.models))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([i for i in range(2) if self.models[i].loading]))
        model = self.models[rank]
        entry_id = data.draw(st.sampled_from(model.loading))
        self.queues[rank].complete(entry_id)
        model.loading.remove(entry_id)
        model.arrived.append(entry_id)
        model.settle()

    @rule(rank=st.integers(0, 1), seconds=st.sampled_from((0.0, 1.0)))
    def poll(self, rank: int, seconds: float) -> None:
        self.now += seconds
        self.models[rank].settle(self.now)
        self.queues[rank].poll(self.now)

    @rule(request_id=REQUESTS)
    def cancel(self, request_id: str) -> None:
        for queue, model in zip(self.queues, self.models, strict=True):
            assert queue.cancel(request_id) == any(r.request_id == request_id for r in model.requests)
            model.requests = [r for r in model.requests if r.request_id != request_id]
            model.settle()

    @rule(request_ids=st.lists(REQUESTS, unique=True))
    def agree(self, request_ids: list[str]) -> None:
        request_ids = [request_id for request_id in request_ids if request_id in self.queues[0]]
        votes = np.max([queue.votes(request_ids) for queue in self.queues], axis=0)
        states = [
            [next(r for r in model.requests if r.request_id == request_id).state for request_id in request_ids]
            for model in self.models
        ]
        left = [
            request_id
            for request_id, *here in zip(request_ids, *states, strict=True)
            if LATE in here or here == [ARRIVED] * 2
        ]
        assert [queue.apply(request_ids, votes) for queue in self.queues] == [left, left]
        for model in self.models:
            model.requests = [r for r in model.requests if r.request_id not in left]
            model.settle()

    @rule(rank=st.integers(0, 1))
    def drain(self, rank: int) -> None:
        assert sorted(self.queues[rank].drain()) == sorted(self.models[rank].drained)
        self.models[rank].drained = []

    @invariant()
    def queues_equal_models(self) -> None:
        for queue, model in zip(getattr(self, "queues", ()), getattr(self, "models", ()), strict=True):
            queue.check_integrity()
            assert queue.num_loading == len(model.loading)
            assert [(r, queue.state_of(r)) for r in queue._requests] == [
                (r.request_id, r.state) for r in model.requests
            ]


TestPrefetch = PrefetchMachine.TestCase
TestPrefetch.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
