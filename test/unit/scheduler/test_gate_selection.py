"""VerificationQueue: the share that was asked for, alike everywhere, bounded, and nobody lost."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chunk_cache.gate.verification_queue import DROPPED, MAX_TRIES, MAX_WAITING, Candidate, VerificationQueue
from chunk_cache.keys import Partition

PROMPT, ANSWER = array("q", [1, 2, 3]), array("q", [4])


def choose(queue: VerificationQueue) -> Candidate | None:
    return queue.choose("r", PROMPT, Partition(), method="epic", ratio=0.1, step=None)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_is_chosen_and_every_rank_chooses_alike(share: float) -> None:
    queues = [VerificationQueue(share) for _ in range(2)]
    chosen = [[choose(queue) is not None for _ in range(4000)] for queue in queues]
    assert chosen[0] == chosen[1]
    assert sum(chosen[0]) / 4000 == pytest.approx(share, abs=0.02)


def test_clients_who_take_turns_are_all_chosen() -> None:
    queue = VerificationQueue(0.5)
    chosen = [choose(queue) is not None for _ in range(4000)]
    for client in range(4):
        assert sum(chosen[client::4]) == pytest.approx(500, abs=80)


def test_the_oldest_goes_where_too_many_wait() -> None:
    queue = VerificationQueue(1.0)
    candidates = [choose(queue) for _ in range(MAX_WAITING + 1)]
    reasons = [queue.finish(candidate, ANSWER) for candidate in candidates if candidate is not None]
    assert reasons == [None] * MAX_WAITING + ["full"]
    assert queue.take(1) is candidates[1]


def test_one_without_room_lets_others_go_ahead_until_there_is_more() -> None:
    queue = VerificationQueue(1.0)
    first, second, third = (choose(queue) for _ in range(3))
    for candidate in (first, second, third):
        assert candidate is not None
        queue.finish(candidate, ANSWER)
    assert queue.take(100) is first
    assert first is not None
    queue.defer(first, 100)
    assert queue.take(100) is second
    assert queue.take(101) is first
    assert queue.take(0) is third
    assert queue.take(10**9) is None


def test_a_verification_is_given_up_so_often_and_not_more() -> None:
    queue = VerificationQueue(1.0)
    candidate = choose(queue)
    assert candidate is not None
    queue.finish(candidate, ANSWER)
    for _ in range(MAX_TRIES):
        assert queue.take(1) is candidate
        queue.put_back(candidate)
    assert queue.take(1) is None
    assert queue.stats()["dropped"] == {"busy": 1}


class Verifications(RuleBasedStateMachine):
    """Requests in any order of what can happen to them; the counts must add up after each."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = VerificationQueue(0.7)
        self.running: list[Candidate] = []
        self.num_chosen = 0
        self.ended = 0

    @rule()
    def admit(self) -> None:
        candidate = choose(self.queue)
        if candidate is not None:
            self.running.append(candidate)
            self.num_chosen += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.queue.finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))), ANSWER)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(sorted(DROPPED)))
    def lose(self, data: st.DataObject, reason: str) -> None:
        self.queue.drop(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))), reason)

    @rule(outcome=st.sampled_from(["complete", "put_back", "defer"]), num_free=st.integers(0, 9))
    def verify(self, outcome: str, num_free: int) -> None:
        candidate = self.queue.take(num_free)
        if candidate is None:
            return
        assert candidate.drop_reason is None
        if outcome == "defer":
            self.queue.defer(candidate, num_free)
        else:
            getattr(self.queue, outcome)(candidate)

    @rule()
    def change_weights(self) -> None:
        self.queue.drop_all("weights")
        assert len(self.queue) == 0

    @invariant()
    def nobody_is_lost(self) -> None:
        self.queue.check_integrity()
        stats = self.queue.stats()
        assert stats["chosen"] == self.num_chosen
        assert stats["in_flight"] == len(self.running)
        assert stats["waiting"] <= MAX_WAITING


TestVerifications = Verifications.TestCase
TestVerifications.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
