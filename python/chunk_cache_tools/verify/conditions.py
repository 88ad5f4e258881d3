"""Conditions: under which method and ratio a prompt is asked.

- `parse_method` reads `epic`, `cacheblend:focus_window=3,group_size=8` or `a3:keep_tokens=512`.
- `grid` gives one condition per method and ratio; a method that ignores the ratio gets one in all.
- `REFERENCE` is stock SGLang's full prefill; everything else is compared with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, Options, OptionValue, find_method
from chunk_cache.methods.method_options import ALPHA, FOCUS_WINDOW, GROUP_SIZE, value_of
from chunk_cache_tools.verify.jsonl import DataError

REFERENCE_LABEL = "off"
KEEP_TOKENS = "keep_tokens"
"""Of the request, not of its method; it works while an answer is decoded, so likelihoods say nothing of it."""
_COMMA = re.compile(r",(?![^\[]*\])")  # not within a list


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, checked, and what decoding keeps of the prompt (None: as the server says)."""

    method: str
    options: Options = ()
    keep_tokens: int | None = None

    @property
    def label(self) -> str:
        """The name that the command line and tables have for it."""
        kept = () if self.keep_tokens is None else ((KEEP_TOKENS, self.keep_tokens),)
        options = ",".join(f"{name}={_format_value(value)}" for name, value in (*self.options, *kept))
        return f"{self.method}:{options}" if options else self.method

    @property
    def is_composed(self) -> bool:
        """Whether grouping or early termination is asked for."""
        return any(name in (GROUP_SIZE.name, FOCUS_WINDOW.name) for name, _ in self.options)

    @property
    def alpha(self) -> float | None:
        """Cache-Craft's, where it takes the place of the ratio."""
        value = dict(self.options).get(ALPHA.name)
        return value if isinstance(value, float) else None


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
        kept = {} if self.method.keep_tokens is None else {KEEP_TOKENS: self.method.keep_tokens}
        return {"method": self.method.method, **ratio, **options, **kept}


REFERENCE = Condition(None)


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
    kept = options.pop(KEEP_TOKENS, None)
    if kept is not None and (type(kept) is not int or kept < 1):
        raise DataError(f"--methods: {KEEP_TOKENS}={kept} in {text!r} is no number of tokens; give one of at least 1.")
    try:
        return MethodSpec(name, find_method(name, "--methods").check_options(options, f"--methods {name}"), kept)
    except ChunkCacheRequestError as error:
        raise DataError(f"{error}.") from error


def check_likelihood(methods: Iterable[MethodSpec]) -> None:
    """Checks that likelihoods can be asked of all of these.

    Raises:
        DataError: one keeps a part of the prompt only, which shows in answers.
    """
    for spec in methods:
        if spec.keep_tokens is not None:
            raise DataError(f"--methods: {KEEP_TOKENS} of {spec.label!r} changes no likelihood; leave it out here.")


def grid(methods: Iterable[MethodSpec], ratios: Iterable[float]) -> list[Condition]:
    """All methods x ratios, without those that ask for the same thing twice; a method with an `alpha` has no ratio."""
    ratios = list(ratios)
    found: dict[Condition, None] = {}
    for spec in methods:
        for ratio in ratios:
            effective = None if spec.alpha else METHODS[spec.method].effective_ratio(ratio, ratio)
            found[Condition(spec, effective)] = None
    return list(found)


def _format_value(value: OptionValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
