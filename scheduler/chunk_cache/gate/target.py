"""Target: how far an answer may be from the exact one, and the steps that lead there.

    {"kl": 0.1, "percentile": 95, "steps": [["near-words", 0.15], ["near-words", 0.3], ["cacheblend", 0.5]]}

`parse_target` checks it and is the only place that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import ChunkCacheConfigError, config_error, known_names, show
from chunk_cache.methods import METHODS, find_method
from chunk_cache.options.defaults import DEFAULT_METHOD

FLAG = "--chunk-cache-target"
KEYS = ("kl", "percentile", "steps")
PERCENTILE = 95.0
MAX_STEPS = 16
_FIRST_RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Step:
    """How chunks are reused by requests that do not say how."""

    method: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Target:
    """The given percentage of verified replies has a KL of at most `kl` nats."""

    kl: float
    """Largest KL of the first token, exact to fused, in nats."""
    percentile: float
    """Percentage of the verified replies that must have a KL of at most `kl`, 50 to 99.9; 95 where it is left out."""
    steps: tuple[Step, ...]
    """Pairs of method and ratio, from the least that is recomputed to the most; behind the last is exact prefill."""

    @property
    def allowed_share(self) -> float:
        """Share of the replies that may have a larger KL."""
        return 1.0 - self.percentile / 100.0


def parse_target(value: object, *, method: str, ratio: float) -> Target:
    """Check a decoded `--chunk-cache-target`.

    Args:
        method, ratio: the server's, which are the first step where none are given.

    Raises:
        ChunkCacheConfigError: not an object, an unknown key, or a value outside its range.
    """
    if not isinstance(value, Mapping):
        raise config_error(FLAG, f"{show(value)} is not an object", 'give a JSON object such as {"kl": 0.1}')
    for key in value:
        if key not in KEYS:
            raise config_error(f"{FLAG}: {key}", f"unknown key {show(key)}", known_names(key, KEYS))
    if "kl" not in value:
        raise config_error(f"{FLAG}: kl", "is missing", "give the KL of the first token, in nats, such as 0.1")
    return Target(
        kl=_number(value["kl"], f"{FLAG}: kl", 1e-6, 100.0),
        percentile=_number(value.get("percentile", PERCENTILE), f"{FLAG}: percentile", 50.0, 99.9),
        steps=_parse_steps(value["steps"]) if "steps" in value else default_steps(method, ratio),
    )


def default_steps(method: str, ratio: float) -> tuple[Step, ...]:
    """The server's own method and ratio, and then its ratio twice, four times, ... as long as that saves something.

    A method that recomputes all or nothing whatever the ratio says is followed by nothing, or by the default method.
    """
    ratios = [METHODS[method].effective_ratio(None, ratio)]
    while ratios[-1] and ratios[-1] * 2 < 0.9:
        ratios.append(ratios[-1] * 2)
    if ratios[0]:
        return tuple(Step(method, ratio) for ratio in ratios)
    follower = DEFAULT_METHOD if METHODS[method].effective_ratio(1.0, 1.0) == 0.0 else method
    return Step(method, 0.0), *default_steps(follower, _FIRST_RATIO)


def _parse_steps(value: object) -> tuple[Step, ...]:
    path = f"{FLAG}: steps"
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_STEPS:
        raise config_error(path, f"{show(value)} is not a list of 1 to {MAX_STEPS} steps", "give [method, ratio] pairs")
    steps: list[Step] = []
    for i, item in enumerate(value):
        where = f"{path}[{i}]"
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            problem = f"{show(item)} is not a [method, ratio] pair"
            raise config_error(where, problem, 'give one such as ["near-words", 0.3]')
        try:
            method = find_method(item[0], f"{where}[0]")
        except ValueError as error:
            raise ChunkCacheConfigError(str(error)) from None
        step = Step(method.name, _number(item[1], f"{where}[1]", 0.0, 1.0))
        if any(one.method == step.method and one.ratio >= step.ratio for one in steps):
            problem = f"{step.ratio:g} is not above the ratio of an earlier step of {step.method}"
            raise config_error(f"{where}[1]", problem, "order steps from the least that is recomputed to the most")
        steps.append(step)
    return tuple(steps)


def _number(value: object, path: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise config_error(path, f"{show(value)} is not a number in [{least:g}, {most:g}]", "give such a number")
    return float(value)


def describe(target: Target) -> dict[str, Any]:
    """The target as JSON values."""
    steps = [[step.method, step.ratio] for step in target.steps]
    return {"kl": target.kl, "percentile": target.percentile, "steps": steps}
