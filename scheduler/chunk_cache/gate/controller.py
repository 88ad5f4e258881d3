"""TargetController: method and ratio for requests that name none, so that a target holds.

Verbs: `decide` (a request came), `observe` (a reply was verified), `states` (where each partition stands), `dump` and
`load` (as JSON values).

Each partition stands on one step of the target. Too many replies above the target move it up a step at once (at
percentile 95: 2 of the newest 2, 3 of 4, 6 of 32); behind the last step it is served exactly. It moves down a step
after `PATIENCE` verified replies that held the target, or, if it was served exactly, after `EXACT_REQUESTS` requests,
since none of these can be verified. A step that fails when it is tried again doubles the wait before the next try.
Replies of one step say nothing of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chunk_cache.errors import show
from chunk_cache.gate.target import Step, Target

PATIENCE = 64
"""Verified replies that hold the target before less is tried."""
EXACT_REQUESTS = 256
"""Requests that are computed exactly before reuse is tried again."""
MAX_WAIT = 16
"""Largest factor on both of these, however often a step has failed."""
WINDOWS = (2, 4, 8, 16, 32, 64)
"""Numbers of newest replies that are looked at."""
_SURELY = 0.01
"""Significance level: the target fails in a window whose replies would be less likely than this if it held."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How one request is served.

    Attributes:
        number: of the step, from 0.
        step: method and ratio; None = exactly.
        reason: why this step, and no lower one.
    """

    number: int
    step: Step | None
    reason: str


@dataclass(slots=True)
class _Place:
    """Where a partition stands.

    Attributes:
        step: number of the step; that behind the last is exact.
        newest: whether each of the newest replies of this step was above the target.
        num_seen: verified replies of this step, or requests where it is exact.
        wait: factor on the usual wait before less is tried.
        is_trial: it moved down to this step, which has not held the target for long yet.
    """

    step: int = 0
    newest: list[bool] = field(default_factory=list)
    num_seen: int = 0
    wait: int = 1
    is_trial: bool = False
    reason: str = "the first step, nothing speaks against it"

    def move(self, step: int, reason: str) -> None:
        # A failed trial doubles the next wait; if the step had held the target before, the wait is the usual one again.
        if step > self.step:
            self.wait = min(2 * self.wait, MAX_WAIT) if self.is_trial else 1
        self.is_trial = step < self.step
        self.step, self.reason = step, reason
        self.newest.clear()
        self.num_seen = 0


class TargetController:
    """See the head of this file."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._places: dict[str, _Place] = {}

    @property
    def num_steps(self) -> int:
        return len(self.target.steps)

    def decide(self, partition: str) -> Decision:
        """How the next request of a partition is served."""
        place = self._places.setdefault(partition, _Place())
        if place.step == self.num_steps:
            place.num_seen += 1
            if place.num_seen > EXACT_REQUESTS * place.wait:
                num = place.num_seen - 1
                place.move(place.step - 1, f"{num} requests were computed exactly, so reuse is tried again")
        step = self.target.steps[place.step] if place.step < self.num_steps else None
        return Decision(place.step, step, place.reason)

    def observe(self, partition: str, step: int, kl: float) -> str | None:
        """Notes the KL of a reply that was served at `step`; returns why the partition moves, if it does."""
        place = self._places.get(partition)
        if place is None or step != place.step or step == self.num_steps:
            return None  # it has moved since
        place.newest = [*place.newest, kl > self.target.kl][-WINDOWS[-1] :]
        place.num_seen += 1
        failure = failing_window(place.newest, self.target.allowed_share)
        if failure is not None:
            above, num = failure
            at, kl_text = self.target.steps[step], f"{self.target.kl:g}"
            reason = f"{above} of the newest {num} replies of {at.method} at {at.ratio:g} had a KL above {kl_text}"
            place.move(step + 1, reason)
        elif place.num_seen >= PATIENCE * (1 if place.is_trial else place.wait):
            if place.is_trial:
                place.is_trial, place.wait = False, 1
            if step == 0:
                return None
            place.move(step - 1, f"{place.num_seen} replies held the target, so less is tried")
        else:
            return None
        return f"partition {partition}: {self._name(place.step)}, because {place.reason}"

    def _name(self, number: int) -> str:
        if number == self.num_steps:
            return "exact prefill"
        step = self.target.steps[number]
        return f"{step.method} at {step.ratio:g}"

    def states(self) -> dict[str, dict[str, Any]]:
        """Where each partition stands, as JSON values."""
        return {
            partition: {
                "step": place.step,
                "is_exact": place.step == self.num_steps,
                "serves": self._name(place.step),
                "reason": place.reason,
                "replies": len(place.newest),
                "above": sum(place.newest),
            }
            for partition, place in sorted(self._places.items())
        }

    def dump(self) -> dict[str, Any]:
        """Where each partition stands, for `load`."""
        return {partition: asdict(place) for partition, place in sorted(self._places.items())}

    def load(self, value: Mapping[str, Any]) -> None:
        """Takes what `dump` gave, of a controller with the same target.

        Raises:
            ValueError: `dump` did not give this.
        """
        for partition, fields in value.items():
            try:
                place = _Place(**fields)
            except TypeError as error:
                raise ValueError(f"{show(fields)} is no place of a partition ({error})") from error
            numbers = (place.step, place.num_seen, place.wait)
            if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers) or not (
                isinstance(place.newest, list)
                and all(isinstance(one, bool) for one in (*place.newest, place.is_trial))
                and isinstance(place.reason, str)
            ):
                raise ValueError(f"{show(fields)} is no place of a partition")
            if place.step > self.num_steps:
                raise ValueError(f"{show(place.step)} is no step of the target")
            self._places[partition] = place


def failing_window(newest: Sequence[bool], allowed: float) -> tuple[int, int] | None:
    """The first window that chance does not explain: how many replies were above the target, of how many."""
    for num in WINDOWS:
        if num > len(newest):
            return None
        above = sum(newest[-num:])
        if tail_probability(num, above, allowed) < _SURELY:
            return above, num
    return None


def tail_probability(num: int, at_least: int, share: float) -> float:
    """P(X >= at_least) of a binomial distribution."""
    return sum(math.comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(at_least, num + 1))
