"""Prefetching: its promises one by one, and a state machine of two ranks against a model of plain lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunk_cache.prefetch import OTHER_RANK, PrefetchQueue, Progress, State

ARRIVED, FAILED, LATE, WAITING = State.ARRIVED, State.FAILED, State.LATE, State.WAITING


def test_one_load_serves_several_requests() -> None:
    queue = PrefetchQueue()
    assert queue.want("r", ["a", "b"], 0.0).state is WAITING
    assert queue.want("s", ["b", "c", "b"], 1.0).state is WAITING
    assert queue.take(2) == ("a", "b")
    assert (queue.take(9), queue.take(9), queue.num_loading) == (("c",), (), 3)
    queue.complete("b", True)
    queue.complete("c", True)
    assert queue.poll(2.0) == [("r", WAITING, None), ("s", ARRIVED, None)]
    queue.complete("a", True)
    assert queue.votes(["s", "r"]).tolist() == [0, 0]
    assert queue.votes(["s", "r"]).dtype == np.int8
    queue.check_integrity()


def test_oldest_request_first_even_if_a_younger_wanted_more() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["c"], 0.0)
    queue.want("s", ["a", "c"], 0.0)
    queue.want("t", ["b"], 0.0)
    assert queue.cancel("r")
    assert queue.take(3) == ("a", "c", "b")


def test_arrived_and_failed_entries_count_for_newcomers() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["a"], 0.0)
    queue.want("s", ["b"], 0.0)
    queue.take(2)
    queue.complete("a", True)
    queue.complete("b", False, "corrupt")
    assert queue.want("t", ["a"], 1.0) == ("t", ARRIVED, None)
    assert queue.want("u", ["a", "b", "c"], 1.0) == ("u", FAILED, "corrupt")
    assert queue.take(5) == ()  # "c" is wanted by a request that is computed anyway
    queue.check_integrity()


def test_nothing_wanted_has_arrived_even_after_the_deadline() -> None:
    assert PrefetchQueue().want("r", [], 5.0, deadline=1.0) == ("r", ARRIVED, None)
    assert PrefetchQueue().want("r", ["a"], 5.0, deadline=5.0) == ("r", LATE, None)


def test_late_stays_late_and_arrived_stays_arrived() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["a"], 0.0, deadline=2.0)
    queue.want("s", ["b"], 0.0, deadline=2.0)
    queue.take(2)
    queue.complete("b", True)
    assert queue.poll(1.9) == [("r", WAITING, None), ("s", ARRIVED, None)]
    assert queue.poll(2.0) == [("r", LATE, None), ("s", ARRIVED, None)]
    queue.complete("a", True)
    assert queue.poll(0.0)[0].state is LATE


def test_cancelled_loads_are_dropped_unless_started_or_wanted() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["a", "b", "c"], 0.0)
    queue.want("s", ["c"], 0.0)
    assert queue.take(1) == ("a",)
    assert queue.cancel("r")
    assert not queue.cancel("r")
    assert queue.take(5) == ("c",)
    queue.complete("a", True)
    assert (queue.drain(), queue.drain()) == (("a",), ())
    queue.complete("c", False, "gone")
    assert queue.cancel("s")
    assert (queue.drain(), len(queue), queue.num_loading) == ((), 0, 0)
    queue.check_integrity()


def test_load_under_way_is_joined_after_its_request_was_cancelled() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["a"], 0.0)
    queue.take(1)
    queue.cancel("r")
    queue.want("r", ["a"], 1.0)
    assert queue.take(1) == ()
    queue.complete("a", True)
    assert queue.poll(1.0) == [("r", ARRIVED, None)]
    assert queue.drain() == ()


def test_agreed_outcome() -> None:
    queue = PrefetchQueue()
    for request_id in "rstuv":
        queue.want(request_id, [request_id.upper()], 0.0)
    queue.take(5)
    for entry_id in "RST":
        queue.complete(entry_id, True)
    queue.complete("V", False, "corrupt")
    ids = ["v", "r", "s", "t", "u"]
    assert queue.votes(ids).tolist() == [2, 0, 0, 0, 1]
    agreed = np.array([2, 0, 1, 2, 2], dtype=np.int8)
    assert queue.apply(ids, agreed) == [
        ("v", FAILED, "corrupt"),
        ("r", ARRIVED, None),
        ("s", WAITING, None),
        ("t", FAILED, OTHER_RANK),
        ("u", FAILED, OTHER_RANK),
    ]
    assert [p.request_id for p in queue.poll(0.0)] == ["s"]
    assert queue.drain() == ("R", "T")
    queue.check_integrity()


def test_what_cannot_happen() -> None:
    queue = PrefetchQueue()
    queue.want("r", ["a"], 0.0)
    for misuse in (
        lambda: queue.want("r", [], 0.0),
        lambda: queue.complete("a", True),
        lambda: queue.complete("b", True),
        lambda: queue.apply(["r"], np.array([0], dtype=np.int8)),
        lambda: queue.apply(["r"], np.array([], dtype=np.int8)),
    ):
        with pytest.raises(AssertionError):
            misuse()
    queue.take(1)
    with pytest.raises(AssertionError):
        queue.complete("a", False)


def test_pending_loads_stay_bounded() -> None:
    queue = PrefetchQueue()
    for i in range(1000):
        queue.want(f"r{i}", [f"e{i}", f"f{i}"], 0.0)
        queue.cancel(f"r{i}")
    assert len(queue._pending) <= 66


@dataclass
class Request:
    request_id: str
    entry_ids: list[str]
    deadline: float
    state: State = WAITING
    reason: str | None = None


@dataclass
class Model:
    """One rank, by scanning lists."""

    requests: list[Request] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)

    def wanted(self) -> list[str]:
        return [e for r in self.requests for e in r.entry_ids]

    def settle(self, now: float | None = None) -> None:
        """Waiting requests change; what nobody wants goes."""
        for r in self.requests:
            if r.state is not WAITING:
                continue
            reasons = [self.failed[e] for e in r.entry_ids if e in self.failed]
            if reasons:
                r.state, r.reason = FAILED, reasons[0]
            elif all(e in self.arrived for e in r.entry_ids):
                r.state = ARRIVED
            elif now is not None and now >= r.deadline:
                r.state = LATE
        self.drained += [e for e in self.arrived if e not in self.wanted()]
        self.arrived = [e for e in self.arrived if e in self.wanted()]
        self.failed = {e: reason for e, reason in self.failed.items() if e in self.wanted()}

    def take(self, max_loads: int) -> tuple[str, ...]:
        known = self.loading + self.arrived + list(self.failed)
        new = [e for r in self.requests if r.state is WAITING for e in r.entry_ids if e not in known]
        taken = tuple(dict.fromkeys(new))[:max_loads]
        self.loading += taken
        return taken


REQUESTS = st.sampled_from("rstuv")


class PrefetchMachine(RuleBasedStateMachine):
    """Two ranks with the same requests; loads start, end and fail on each by itself."""

    @initialize()
    def start(self) -> None:
        self.queues = [PrefetchQueue(), PrefetchQueue()]
        self.models = [Model(), Model()]
        self.now = 0.0

    @rule(request_id=REQUESTS, entry_ids=st.lists(st.sampled_from("abcd"), max_size=3), wait=st.integers(0, 3))
    def want(self, request_id: str, entry_ids: list[str], wait: int) -> None:
        if request_id in self.queues[0]:
            return
        for queue, model in zip(self.queues, self.models, strict=True):
            progress = queue.want(request_id, entry_ids, self.now, self.now + wait)
            request = Request(request_id, list(dict.fromkeys(entry_ids)), self.now + wait)
            others, model.requests = model.requests, [request]  # its deadline is looked at, that of others is not
            arrived, failed = model.arrived, model.failed
            model.settle(self.now)
            model.drained = [e for e in model.drained if e not in arrived]
            model.arrived, model.failed, model.requests = arrived, failed, [*others, request]
            assert progress == Progress(request_id, request.state, request.reason)

    @rule(rank=st.integers(0, 1), max_loads=st.integers(0, 3))
    def take(self, rank: int, max_loads: int) -> None:
        assert self.queues[rank].take(max_loads) == self.models[rank].take(max_loads)

    @precondition(lambda self: any(model.loading for model in self.models))
    @rule(data=st.data(), ok=st.sampled_from((True, True, False)))
    def complete(self, data: st.DataObject, ok: bool) -> None:
        rank = data.draw(st.sampled_from([i for i in range(2) if self.models[i].loading]))
        model = self.models[rank]
        entry_id = data.draw(st.sampled_from(model.loading))
        self.queues[rank].complete(entry_id, ok, None if ok else f"no {entry_id}")
        model.loading.remove(entry_id)
        if ok:
            model.arrived.append(entry_id)
        else:
            model.failed[entry_id] = f"no {entry_id}"
        model.settle()

    @rule(rank=st.integers(0, 1), seconds=st.sampled_from((0.0, 1.0)))
    def poll(self, rank: int, seconds: float) -> None:
        self.now += seconds
        model = self.models[rank]
        model.settle(self.now)
        expected = [Progress(r.request_id, r.state, r.reason) for r in model.requests]
        assert self.queues[rank].poll(self.now) == expected

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
        outcomes = [queue.apply(request_ids, votes) for queue in self.queues]
        for i, request_id in enumerate(request_ids):
            here = [states[rank][i] for rank in range(2)]
            agreed = [outcomes[rank][i] for rank in range(2)]
            assert [p.request_id for p in agreed] == [request_id] * 2
            if here == [ARRIVED] * 2:
                assert [p.state for p in agreed] == here
            elif FAILED in here or LATE in here:
                for state, progress in zip(here, agreed, strict=True):
                    assert progress.state is (state if state in (FAILED, LATE) else FAILED)
                    assert state in (FAILED, LATE) or progress.reason == OTHER_RANK
            else:
                assert [p.state for p in agreed] == [WAITING] * 2
                continue
            for model in self.models:
                model.requests = [r for r in model.requests if r.request_id != request_id]
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
            assert len(queue) == len(model.requests)
        if hasattr(self, "queues"):
            assert list(self.queues[0]._requests) == list(self.queues[1]._requests)


TestPrefetch = PrefetchMachine.TestCase
TestPrefetch.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
