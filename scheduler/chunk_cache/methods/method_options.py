"""Options: the parameters of a method, as a client may send them; each kind checks one value.

A schema is a tuple of these; `check_options` checks an object against it. Values are plain JSON values that can be
hashed (a list becomes a tuple), so that checked options can be compared and cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

from chunk_cache.errors import known_names, request_error, show

MAX_LAYER = 1023  # a bound for messages; the model's own is checked by `Method.check_model`

OptionValue: TypeAlias = int | float | str | tuple[int, ...]
Options: TypeAlias = tuple[tuple[str, OptionValue], ...]
"""A method's parameters as (name, value), sorted by name; those left out have their default."""


class Option(Protocol):
    """One parameter of a method."""

    @property
    def name(self) -> str: ...

    @property
    def default(self) -> OptionValue: ...

    def check(self, value: object, path: str) -> OptionValue:
        """The value, or a `ChunkCacheRequestError` that names `path`."""


@dataclass(frozen=True, slots=True)
class IntOption:
    """An integer, `minimum` <= value <= `maximum`."""

    name: str
    default: int
    minimum: int
    maximum: int

    def check(self, value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            problem = f"{show(value)} is not an integer in [{self.minimum}, {self.maximum}]"
            raise request_error(path, problem, "give an integer in that range")
        return value


@dataclass(frozen=True, slots=True)
class FloatOption:
    """A number, `minimum` <= value <= `maximum`."""

    name: str
    default: float
    minimum: float
    maximum: float

    def check(self, value: object, path: str) -> float:
        # NaN is in no range, and a huge integer is compared without becoming a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.minimum <= value <= self.maximum:
            problem = f"{show(value)} is not a number in [{self.minimum:g}, {self.maximum:g}]"
            raise request_error(path, problem, "give a number in that range")
        return float(value)


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """One of a few words; `choices[0]` is the default."""

    name: str
    choices: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.choices[0]

    def check(self, value: object, path: str) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise request_error(path, f"unknown value {show(value)}", f"known values: {', '.join(self.choices)}")
        return value


@dataclass(frozen=True, slots=True)
class LayersOption:
    """Which layers: ``"last"``, ``"all"``, or a list of layer numbers counted from 0."""

    name: str
    default: str = "last"

    def check(self, value: object, path: str) -> OptionValue:
        if isinstance(value, str) and value in ("last", "all"):
            return value
        layers = layer_numbers(value)
        if layers is None or max(layers) > MAX_LAYER:
            problem = f'{show(value)} is neither "last", "all" nor a list of layer numbers'
            raise request_error(path, problem, "count layers from 0")
        if any(b <= a for a, b in pairwise(layers)):
            raise request_error(path, f"{show(value)} does not ascend", "name each layer once")
        return layers


def value_of(text: str) -> object:
    """An option's value from a command line: JSON, or else the text itself, so that a word needs no quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def layer_numbers(value: object) -> tuple[int, ...] | None:
    """A list of layer numbers counted from 0, at least one; None where it is anything else."""
    layers = value if isinstance(value, (list, tuple)) else ()
    if not layers or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in layers):
        return None
    return tuple(layers)


def layers_of(value: OptionValue, num_layers: int) -> tuple[int, ...]:
    """The layers that a checked `LayersOption` means in a model of `num_layers`."""
    if value == "all":
        return tuple(range(num_layers))
    if value == "last":
        return (num_layers - 1,)
    assert isinstance(value, tuple)
    return value


ALPHA = FloatOption("alpha", default=0.0, minimum=0.0, maximum=1000.0)
"""The budget of each chunk is its CFO, alpha x CCI x (1 - beta'), not the ratio (Cache-Craft eq. 12); 0 = off."""

ENDS = IntOption("ends", default=0, minimum=0, maximum=2**31 - 1)
"""Tokens at either end of each chunk, in the place of the ratio (A3: 20); 0 = by the ratio."""
BUDGETS: tuple[Option, ...] = (ALPHA, ENDS)
"""Options that are budgets themselves, so that none is given beside a ratio."""


def budget_in(options: Options) -> str | None:
    """The name of the first of `BUDGETS` that is set in checked options; None if the ratio is the budget."""
    given = dict(options)
    return next((option.name for option in BUDGETS if given.get(option.name)), None)


# Common to all methods. Off by default, because no table of ours shows a gain (docs/quality.md).
GROUP_SIZE = IntOption("group_size", default=0, minimum=0, maximum=4096)
"""Tokens per window of CacheClip's grouping (its paper, and the default of its method: 8); 0 = no grouping."""
GROUP_THRESHOLD = IntOption("group_threshold", default=5, minimum=0, maximum=4095)
"""A window keeps its selected tokens only where more than this many were selected (paper: 5 of 8)."""
GROUP_BUDGET = ChoiceOption("group_budget", ("chosen", "kept"))
"""What the ratio counts under CacheClip's grouping: tokens that are chosen before windows drop some, as its section 3.3
reads, or those that windows keep, so that these fill the ratio."""
BLOCK_SIZE = IntOption("block_size", default=0, minimum=0, maximum=256)
"""Tokens per block; blocks are chosen by their mean score, the last one in part. *Ours*. 0 = token by token."""
FOCUS_WINDOW = IntOption("focus_window", default=0, minimum=0, maximum=1024)
"""Layers over which Cache-Craft's focused chunks must agree before rows of others are dropped; 0 = off."""
SHIFT = IntOption("shift", default=1, minimum=0, maximum=1)
"""0 leaves K at the rotary phase it was computed with: a diagnostic that shows what the shift is worth."""
DRIFT = FloatOption("drift", default=0.0, minimum=0.0, maximum=1.0)
"""How much of the recomputed tokens' mean change is added to the reused ones that are not recomputed; 0 = none."""
COMMON_OPTIONS: tuple[Option, ...] = (GROUP_SIZE, GROUP_THRESHOLD, BLOCK_SIZE, FOCUS_WINDOW, DRIFT, SHIFT)


def check_options(options: Mapping[str, object], schema: Sequence[Option], path: str, owner: str) -> Options:
    """The given parameters, checked and sorted; those left out keep their default.

    Args:
        owner: whose options they are, for messages.

    Raises:
        ChunkCacheRequestError: a name that is not in the schema, a value outside its range, or two that do not fit.
    """
    known = {option.name: option for option in schema}
    for name in options:
        if name not in known:
            raise request_error(path, f"unknown key {show(name)} for {owner}", known_names(name, known))
    checked = {name: known[name].check(value, f"{path}.{name}") for name, value in options.items()}
    _check_grouping(checked, known, path)
    return tuple(sorted(checked.items()))


def _check_grouping(checked: Mapping[str, OptionValue], known: Mapping[str, Option], path: str) -> None:
    size, threshold = (checked.get(o.name, known.get(o.name, o).default) for o in (GROUP_SIZE, GROUP_THRESHOLD))
    assert isinstance(size, int)
    assert isinstance(threshold, int)
    if size == 0 and GROUP_THRESHOLD.name in checked:
        problem = "given without group_size"
        raise request_error(f"{path}.{GROUP_THRESHOLD.name}", problem, "give group_size too")
    if 0 < size <= threshold:
        problem = f"no window of {size} tokens has more than {threshold} of them"
        raise request_error(
            f"{path}.{GROUP_THRESHOLD.name}",
            problem,
            f"give a group_threshold below {size}",
        )
