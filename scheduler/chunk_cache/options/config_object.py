"""Objects inside `--chunk-cache-config`: a dataclass each, whose fields carry the parser of their key.

timeout_s: float = field(default=5.0, metadata={"parse": parse_seconds})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from chunk_cache.errors import config_error, given, known_names, show

Parse: TypeAlias = Callable[[object, str], object]
"""Checks a value; the path says where it stood, for messages."""
MOST_SECONDS = 86_400
"""A day. Python cannot wait for much longer."""


def checked_object(value: object, path: str, known: Sequence[str], asks_for: str = "some of ") -> Mapping[str, Any]:
    """The value, checked to be an object with no other keys, without those that are null, which are not given.

    Raises:
        ChunkCacheConfigError: it is not.
    """
    if not isinstance(value, Mapping):
        remedy = f"give an object with {asks_for}{', '.join(known)}"
        raise config_error(path, f"{show(value)} is not an object", remedy)
    for key in value:
        if key not in known:
            raise config_error(f"{path}.{key}", f"unknown key {show(key)}", known_names(key, known))
    return given(value)


def parsed_fields(kind: type, value: object, path: str, asks_for: str = "some of ", **absent: object) -> dict[str, Any]:
    """The fields of the dataclass that an object gives, each as its own parser reads it.

    Args:
        absent: values for missing keys, so that the parser of a key that must be given refuses them.

    Raises:
        ChunkCacheConfigError: not an object, an unknown key, or a value outside its range.
    """
    parsers: dict[str, Parse] = {key.name: key.metadata["parse"] for key in fields(kind)}
    items = {**absent, **checked_object(value, path, list(parsers), asks_for)}
    return {key: parsers[key](item, f"{path}.{key}") for key, item in items.items()}


def parse_seconds(value: object, path: str) -> float:
    """A number of seconds, from a millisecond to a day."""
    seconds = parse_number(value, path, least=0.001)
    if seconds > MOST_SECONDS:
        raise config_error(path, f"{show(value)} is more than a day", f"give at most {MOST_SECONDS}")
    return seconds


def parse_number(value: object, path: str, least: float) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
        raise config_error(path, f"{show(value)} is not a number of at least {least:g}", "give such a number")
    return float(value)
