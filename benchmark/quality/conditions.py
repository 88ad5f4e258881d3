"""Conditions: under which method and ratio a question is asked.

- `parse_method` reads `epic` or `cacheblend:focus_window=3,group_size=8`; `built_methods` are all that exist, and
  `composed_methods` the same with early termination and with grouping.
- `conditions_of` gives one condition per method and ratio; a method that ignores the ratio gets one in all.
- `REFERENCE` is stock SGLang's full prefill; everything else is compared with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.quality.question import DataError

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER, Options, OptionValue, find_method
from chunk_cache.methods.options import ALPHA, FOCUS_WINDOW, GROUP_SIZE, value_of

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
NO_SHIFT_OPTIONS = (("shift", 0),)
COMPOSED_RATIOS = (0.15,)
# The papers' values: three layers must agree (Cache-Craft, section 3.4), more than 5 of 8 tokens (CacheClip).
FOCUS_OPTIONS = (("focus_window", 3),)
GROUP_OPTIONS = (("group_size", 8), ("group_threshold", 5))
REFERENCE_LABEL = "off"
_COMMA = re.compile(r",(?![^\[]*\])")  # not within a list


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, checked."""

    method: str
    options: Options = ()

    @property
    def label(self) -> str:
        """The name that the command line and tables have for it."""
        options = ",".join(f"{name}={_format_value(value)}" for name, value in self.options)
        return f"{self.method}:{options}" if options else self.method

    @property
    def is_composed(self) -> bool:
        """Whether grouping or early termination is asked for."""
        return any(name in (GROUP_SIZE.name, FOCUS_WINDOW.name) for name, _ in self.options)


@dataclass(frozen=True)
class Condition:
    """One way to ask; `method` is None for the reference, `ratio` also where the method's `alpha` takes its place."""

    method: MethodSpec | None
    ratio: float | None = None

    @property
    def label(self) -> str:
        return REFERENCE_LABEL if self.method is None else self.method.label

    @property
    def request(self) -> dict[str, Any]:
        """What goes into `custom_params.chunk_cache`."""
        if self.method is None:
            return {"mode": "off"}
        ratio = {} if self.ratio is None else {"ratio": self.ratio}  # the server refuses one beside alpha
        options = {"options": dict(self.method.options)} if self.method.options else {}
        return {"method": self.method.method, **ratio, **options}


REFERENCE = Condition(None)
NO_SHIFT = MethodSpec("full-reuse", NO_SHIFT_OPTIONS)
"""Reuse that keeps the rotation of K with which a chunk was computed, as the papers' lowest row does."""
FULL_REUSE = MethodSpec("full-reuse")


def parse_method(text: str) -> MethodSpec:
    """`name` or `name:option=value,...`; a value is a number, a word, or a list such as [0,1].

    Raises:
        DataError: no such method or option, or a value outside its range.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, _COMMA.split(rest)):
        key, equals, value = item.partition("=")
        if not equals:
            raise DataError(f"--methods: {item!r} in {text!r} is not OPTION=VALUE; write {name}:shift=0.")
        options[key] = value_of(value)
    try:
        return MethodSpec(name, find_method(name, "--methods").check_options(options, f"--methods {name}"))
    except ChunkCacheRequestError as error:
        raise DataError(f"{error}.") from error


def built_methods(*, has_selector: bool = False) -> list[MethodSpec]:
    """Every method that the server has with its defaults, and reuse without the position shift."""
    specs = [MethodSpec(name) for name in (METHODS if has_selector else METHODS_OF_ANY_SERVER)]
    return [NO_SHIFT, *specs] if has_no_shift() else specs


def composed_methods() -> list[MethodSpec]:
    """Every method that selects rows, with early termination and with grouping."""
    selecting = [name for name in METHODS_OF_ANY_SERVER if METHODS[name].effective_ratio(0.5, 0.5) == 0.5]
    return [MethodSpec(name, options) for name in selecting for options in (FOCUS_OPTIONS, GROUP_OPTIONS)]


def has_no_shift() -> bool:
    """Whether the position shift can be switched off."""
    names = {option.name for option in METHODS[NO_SHIFT.method].options_schema}
    return {name for name, _ in NO_SHIFT_OPTIONS} <= names


def conditions_of(methods: Iterable[MethodSpec], ratios: Sequence[float]) -> list[Condition]:
    """All methods x ratios, without those that ask for the same thing twice.

    Raises:
        DataError: a method has an `alpha`, which takes the place of the ratio.
    """
    found: dict[Condition, None] = {}
    for spec in methods:
        if ALPHA.name in dict(spec.options):
            raise DataError(
                f"--methods: {spec.label} cannot be asked by ratio; leave {ALPHA.name} out, or ask by alpha with "
                "python benchmark/quality/calibrate.py."
            )
        for ratio in ratios:
            found[Condition(spec, METHODS[spec.method].effective_ratio(ratio, ratio))] = None
    return list(found)


def _format_value(value: OptionValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
