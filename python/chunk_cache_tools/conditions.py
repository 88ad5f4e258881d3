"""Conditions: the method and ratio that a prompt is sent with.

- `parse_method` reads `epic`, `epic:ratio=0.3`, `cacheblend:focus_window=3,group_size=8` or `a3:keep_tokens=512`; every
  command reads methods with it.
- `grid` gives one condition per method and ratio, but only one for a method that ignores the ratio.
- `REFERENCE` is stock SGLang's full prefill; everything else is compared with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error, show
from chunk_cache.methods import METHODS, Options, OptionValue, find_method
from chunk_cache.methods.method_options import FOCUS_WINDOW, GROUP_SIZE, budget_in, value_of
from chunk_cache_tools.jsonl import DataError

REFERENCE_LABEL = "off"
FLAG = "--methods"
RATIO = "ratio"
KEEP_TOKENS = "keep_tokens"
"""Option of the request, not of its method; it only acts while an answer is decoded, so likelihoods do not show it."""
_COMMA = re.compile(r",(?![^\[]*\])")  # matches no comma inside a list


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, checked.

    Attributes:
        keep_tokens: number of prompt tokens that decoding keeps; None = the server's default.
        ratio: ratio that was written beside the options; None = none was.
    """

    method: str
    options: Options = ()
    keep_tokens: int | None = None
    ratio: float | None = None

    @property
    def label(self) -> str:
        """The method and its options, as on the command line and in tables."""
        of_request = ((KEEP_TOKENS, self.keep_tokens), (RATIO, self.ratio))
        given = (*self.options, *((name, value) for name, value in of_request if value is not None))
        options = ",".join(f"{name}={_format_value(value)}" for name, value in given)
        return f"{self.method}:{options}" if options else self.method

    @property
    def is_composed(self) -> bool:
        """Whether the options ask for grouping or early termination."""
        return any(name in (GROUP_SIZE.name, FOCUS_WINDOW.name) for name, _ in self.options)

    @property
    def budget(self) -> str | None:
        """The option that says how much is recomputed in the ratio's place, alpha or ends; None if the ratio does."""
        return budget_in(self.options)


@dataclass(frozen=True)
class Condition:
    """A method and a ratio; both are None for the reference, the ratio also if the method's `budget` replaces it."""

    method: MethodSpec | None
    ratio: float | None = None

    @property
    def label(self) -> str:
        return REFERENCE_LABEL if self.method is None else self.method.label

    @property
    def request(self) -> dict[str, Any]:
        """The object `custom_params.chunk_cache` of the request."""
        if self.method is None:
            return {"mode": "off"}
        ratio = {} if self.ratio is None else {"ratio": self.ratio}  # the server refuses two budgets
        options = {"options": dict(self.method.options)} if self.method.options else {}
        kept = {} if self.method.keep_tokens is None else {KEEP_TOKENS: self.method.keep_tokens}
        return {"method": self.method.method, **ratio, **options, **kept}


REFERENCE = Condition(None)


def parse_method(text: str, common: Mapping[str, Any] | None = None) -> MethodSpec:
    """Parses `name` or `name:option=value,...`; a value is a number, a word, or a list such as [0,1].

    Args:
        common: options for every method that knows them; options in the text win.

    Raises:
        DataError: no such method or option, or a value outside its range.
    """
    path = f"{FLAG} {text}"
    name, colon, rest = text.partition(":")
    try:
        method = find_method(name, path)
        own = _own_options(rest, path) if colon else {}
        kept, ratio = own.pop(KEEP_TOKENS, None), own.pop(RATIO, None)
        if kept is not None and (type(kept) is not int or kept < 1):
            raise request_error(path, f"{KEEP_TOKENS}={show(kept)} is no number of tokens", "give one of at least 1")
        check_ratio(ratio, path)
        known = {option.name for option in method.options_schema}
        options = {key: value for key, value in (common or {}).items() if key in known} | own
        return MethodSpec(name, method.check_options(options, path), kept, ratio)
    except ChunkCacheRequestError as error:
        raise DataError(str(error)) from error


def _own_options(text: str, path: str) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for item in _COMMA.split(text):
        key, _, value = item.partition("=")
        if not (key and value):
            remedy = "write NAME or NAME:OPTION=VALUE,OPTION=VALUE"
            raise request_error(path, f"{show(item)} is not OPTION=VALUE", remedy)
        if key in own:
            raise request_error(path, f"{key} is given twice", "leave one of them out")
        own[key] = value_of(value)
    return own


def check_ratio(ratio: object, path: str) -> None:
    """Checks a recompute ratio that a user gave; None means the server's default.

    Raises:
        ChunkCacheRequestError: not a number from 0 to 1.
    """
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        problem = f"{show(ratio)} is not a number from 0 to 1"
        raise request_error(path, problem, "give a recompute ratio in that range")


def check_likelihood(methods: Iterable[MethodSpec]) -> None:
    """Checks that likelihoods can be measured with all of these methods.

    Raises:
        DataError: a method has `keep_tokens`, which changes answers but no likelihood.
    """
    for spec in methods:
        if spec.keep_tokens is not None:
            raise DataError(f"--methods: {KEEP_TOKENS} of {spec.label!r} changes no likelihood; leave it out here.")


def grid(methods: Iterable[MethodSpec], ratios: Iterable[float]) -> list[Condition]:
    """All pairs of a method and a ratio, without duplicates; a method with another `budget` gets no ratio.

    Raises:
        DataError: a method names its own ratio.
    """
    ratios = list(ratios)
    found: dict[Condition, None] = {}
    for spec in methods:
        if spec.ratio is not None:
            raise DataError(f"{FLAG}: all are asked at the same ratios, {spec.label!r} too; give it to --ratios.")
        for ratio in ratios:
            effective = None if spec.budget else METHODS[spec.method].effective_ratio(ratio, ratio)
            found[Condition(spec, effective)] = None
    return list(found)


def _format_value(value: OptionValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
