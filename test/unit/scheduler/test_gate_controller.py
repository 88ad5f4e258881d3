"""TargetController: stays low while the target holds, moves up fast and down slowly, goes exact, and tries again."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheConfigError
from chunk_cache.gate.controller import EXACT_REQUESTS, MAX_WAIT, PATIENCE, WINDOWS, TargetController, tail_probability
from chunk_cache.gate.target import Step, Target, default_steps, describe, parse_target

STEPS = (Step("epic", 0.15), Step("epic", 0.3), Step("cacheblend", 0.5))
TARGET = Target(0.1, 95.0, STEPS)
EXACT = len(STEPS)


class Traffic:
    """Requests of one partition, all verified; each step has its share of replies above the target."""

    def __init__(self, controller: TargetController, seed: int = 0) -> None:
        self.controller = controller
        self.rng = random.Random(seed)
        self.steps: list[int] = []
        self.moves: list[str] = []

    def run(self, num: int, shares: list[float]) -> Counter[int]:
        served: Counter[int] = Counter()
        for _ in range(num):
            decision = self.controller.decide("p")
            assert decision.step == (STEPS[decision.number] if decision.number < EXACT else None)
            served[decision.number] += 1
            self.steps.append(decision.number)
            if decision.step is None:
                continue
            is_above = self.rng.random() < shares[decision.number]
            move = self.controller.observe("p", decision.number, 1.0 if is_above else 0.0)
            if move is not None:
                self.moves.append(move)
        return served


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(TargetController(TARGET))


def test_what_holds_is_left_alone(traffic: Traffic) -> None:
    assert traffic.run(5000, [0.0, 0.0, 0.0]) == {0: 5000}
    assert traffic.moves == []


def test_it_moves_up_fast_until_the_target_holds(traffic: Traffic) -> None:
    traffic.run(300, [0.0, 0.0, 0.0])
    served = traffic.run(PATIENCE // 2, [1.0, 1.0, 0.0])
    assert served == {0: 2, 1: 2, 2: PATIENCE // 2 - 4}
    assert traffic.moves[0].startswith("partition p: epic at 0.3, because 2 of the newest 2 replies of epic at 0.15")


def test_it_goes_exact_says_why_and_tries_again(traffic: Traffic) -> None:
    traffic.run(6, [1.0, 1.0, 1.0])
    decision = traffic.controller.decide("p")
    assert (decision.number, decision.step) == (EXACT, None)
    assert "2 of the newest 2 replies of cacheblend at 0.5 had a KL above 0.1" in decision.reason
    served = traffic.run(EXACT_REQUESTS, [1.0, 1.0, 1.0])
    assert served[2] == 1
    assert "256 requests were computed exactly" in traffic.controller.states()["p"]["reason"]


def test_tries_that_fail_become_rare_and_one_that_holds_leads_down(traffic: Traffic) -> None:
    served = traffic.run(200_000, [1.0, 1.0, 1.0])
    assert served[2] < 2 * 200_000 / (EXACT_REQUESTS * MAX_WAIT) + 20
    assert served[0] == served[1] == 2
    traffic.run(EXACT_REQUESTS * MAX_WAIT + PATIENCE * (MAX_WAIT + 4), [0.0, 0.0, 0.0])
    assert traffic.controller.states()["p"]["step"] == 0


def test_it_stands_still_between_a_step_that_fails_and_one_that_holds(traffic: Traffic) -> None:
    served = traffic.run(20_000, [0.5, 0.0, 0.0])
    assert served[1] > 0.97 * 20_000
    assert served[2] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_share_above_the_target_is_kept(seed: int) -> None:
    shares = [0.6, 0.2, 0.01]
    traffic = Traffic(TargetController(TARGET), seed)
    served = traffic.run(20_000, shares)
    above = sum(num * shares[step] for step, num in served.items() if step < EXACT)
    assert above / 20_000 < TARGET.allowed_share


def test_partitions_are_apart() -> None:
    controller = TargetController(TARGET)
    for _ in range(4):
        controller.observe("a", controller.decide("a").number, 1.0)
        controller.observe("b", controller.decide("b").number, 0.0)
    assert {name: state["step"] for name, state in controller.states().items()} == {"a": 2, "b": 0}


def test_replies_of_another_step_say_nothing() -> None:
    controller = TargetController(TARGET)
    for _ in range(9):
        controller.decide("p")
    for _ in range(2):
        controller.observe("p", 0, 1.0)
    for _ in range(7):  # they were served before it moved
        assert controller.observe("p", 0, 1.0) is None
    assert controller.decide("p").number == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1), st.booleans()), max_size=400), st.integers(0, 400))
def test_the_same_events_give_the_same_decisions_also_behind_a_restart(
    events: list[tuple[str, float, bool]], restart: int
) -> None:
    one, other = TargetController(TARGET), TargetController(TARGET)
    for i, (partition, kl, is_verified) in enumerate(events):
        if i == restart:
            other, stored = TargetController(TARGET), json.loads(json.dumps(other.dump()))
            other.load(stored)
        decision = one.decide(partition)
        assert other.decide(partition) == decision
        if is_verified and decision.step is not None:
            move = one.observe(partition, decision.number, kl)
            assert other.observe(partition, decision.number, kl) == move
            assert abs(one.decide(partition).number - decision.number) <= 1
    assert one.states() == other.states()


@pytest.mark.parametrize(
    "value",
    [
        {"p": fields}
        for fields in (
            {"step": 9},
            {"step": -1},
            {"step": 0.5},
            {"place": 1},
            {"num_seen": "x"},
            {"wait": None},
            {"newest": 3},
            {"newest": ["no"]},
            {"is_trial": "no"},
            {"reason": 5},
        )
    ],
)
def test_what_was_not_dumped_is_refused(value: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ValueError):
        TargetController(TARGET).load(value)


def test_chance_alone_moves_it_rarely() -> None:
    for num in WINDOWS:
        probabilities = [tail_probability(num, k, 0.05) for k in range(num + 1)]
        assert probabilities[0] == pytest.approx(1.0)
        assert probabilities == sorted(probabilities, reverse=True)


# The target.


@pytest.mark.parametrize(
    ("method", "ratio", "steps"),
    [
        ("epic", 0.15, [("epic", 0.15), ("epic", 0.3), ("epic", 0.6)]),
        ("cacheblend", 0.5, [("cacheblend", 0.5)]),
        ("epic", 0.0, [("epic", 0.0), ("epic", 0.15), ("epic", 0.3), ("epic", 0.6)]),
        ("full-reuse", 0.15, [("full-reuse", 0.0), ("near-words", 0.15), ("near-words", 0.3), ("near-words", 0.6)]),
        ("full", 0.15, [("full", 1.0)]),
    ],
)
def test_default_steps(method: str, ratio: float, steps: list[tuple[str, float]]) -> None:
    assert default_steps(method, ratio) == tuple(Step(*step) for step in steps)


def test_a_target_is_parsed_and_described() -> None:
    value = {"kl": 0.2, "percentile": 90, "steps": [["epic", 0], ["a3", 0.3]]}
    target = parse_target(value, method="epic", ratio=0.15)
    assert target == Target(0.2, 90.0, (Step("epic", 0.0), Step("a3", 0.3)))
    assert target.allowed_share == pytest.approx(0.1)
    assert parse_target(describe(target), method="epic", ratio=0.15) == target


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is not an object"),
        ({}, "--chunk-cache-target: kl: is missing"),
        ({"kl": 0}, "--chunk-cache-target: kl: 0 is not a number in"),
        ({"kl": True}, "is not a number"),
        ({"kl": 0.1, "p": 1}, "unknown key 'p'; known keys: kl, percentile, steps"),
        ({"kl": 0.1, "percentile": 100}, "--chunk-cache-target: percentile: 100"),
        ({"kl": 0.1, "steps": []}, "is not a list of 1 to 16 steps"),
        ({"kl": 0.1, "steps": ["epic"]}, r"steps\[0\]: 'epic' is not a \[method, ratio\] pair"),
        ({"kl": 0.1, "steps": [["best", 0.1]]}, r"steps\[0\]\[0\]: unknown method 'best'"),
        ({"kl": 0.1, "steps": [["epic", 0.3], ["a3", 0.1], ["epic", 0.3]]}, r"steps\[2\]\[1\]: 0.3 is not above the "),
        ({"kl": 0.1, "steps": [["epic", 2]]}, r"steps\[0\]\[1\]: 2 is not a number in \[0, 1\]"),
    ],
)
def test_bad_targets_are_refused(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheConfigError, match=message):
        parse_target(value, method="epic", ratio=0.15)
