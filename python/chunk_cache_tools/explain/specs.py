"""MethodSpec: a method as the command line names it, with its ratio and options.

Verbs: `parse_spec` (`--method` of the command line), `make_specs` (all of them, with the common ratio and options).

    cacheblend
    a3:check_layer=2,top_k=chunk
    fusionrag:layers=[2,5]
    epic:ratio=0.3
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.errors import request_error, show
from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER, find_method
from chunk_cache.methods.method_options import value_of

RATIO = "ratio"
_FORM = "write NAME or NAME:OPTION=VALUE,OPTION=VALUE"


@dataclass(frozen=True)
class MethodSpec:
    """What one request asks for.

    Attributes:
        name: of the method.
        ratio: None leaves it to the server.
        options: the method's own; those left out keep their default.
        label: what the user wrote, or the name.
    """

    name: str
    ratio: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def params(self) -> dict[str, Any]:
        """The object `custom_params.chunk_cache` of its request."""
        params: dict[str, Any] = {"method": self.name, "explain": True}
        if self.ratio is not None:
            params[RATIO] = self.ratio
        if self.options:
            params["options"] = dict(self.options)
        return params


def make_specs(texts: Sequence[str], ratio: float | None, options: Mapping[str, Any]) -> list[MethodSpec]:
    """One spec per text, or one per method that any server has where there is no text.

    Args:
        ratio: of the methods that name none.
        options: given to every method that knows them, unless it names the option itself.

    Raises:
        ChunkCacheRequestError: a text is malformed, a method or an option is unknown, or a value is out of range.
    """
    _check_ratio(ratio, "--ratio")
    specs = [parse_spec(text, ratio, options) for text in texts or METHODS_OF_ANY_SERVER]
    for name in options:
        if not any(name in _known_options(spec.name) for spec in specs):
            known = sorted({option for spec in specs for option in _known_options(spec.name)})
            problem = f"no method that is asked knows {show(name)}"
            raise request_error("--options", problem, f"known options: {', '.join(known)}")
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise request_error(f"--method {label}", "given twice", "leave one of them out")
    return specs


def parse_spec(text: str, ratio: float | None = None, options: Mapping[str, Any] | None = None) -> MethodSpec:
    """One method; `ratio` and `options` as for `make_specs`.

    Raises:
        ChunkCacheRequestError: see there.
    """
    path = f"--method {text}"
    name, colon, rest = text.partition(":")
    method = find_method(name, path)
    own: dict[str, Any] = {}
    # A comma inside of a value, as in layers=[2,5], is not followed by the name of an option.
    for part in re.split(r",(?=\w+=)", rest) if colon else ():
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise request_error(path, f"{show(part)} is not OPTION=VALUE", _FORM)
        if key in own:
            raise request_error(path, f"{key} is given twice", "leave one of them out")
        own[key] = value_of(value)
    ratio = own.pop(RATIO, ratio)
    _check_ratio(ratio, path)
    common = {key: value for key, value in (options or {}).items() if key in _known_options(name)}
    merged = {**common, **own}
    method.check_options(merged, path)
    return MethodSpec(name, ratio, merged, text)


def parse_options(text: str) -> dict[str, Any]:
    """The object of `--options`.

    Raises:
        ChunkCacheRequestError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise request_error(
            "--options", f"not JSON ({error.msg})", 'give an object such as {"top_k": "chunk"}'
        ) from None
    if not isinstance(value, dict):
        raise request_error("--options", "not an object", 'give one such as {"top_k": "chunk"}')
    return value


def _known_options(name: str) -> list[str]:
    return [option.name for option in METHODS[name].options_schema]


def _check_ratio(ratio: object, path: str) -> None:
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        problem = f"{show(ratio)} is not a number from 0 to 1"
        raise request_error(path, problem, "give a recompute ratio in that range")
