"""Errors: a user's mistake, told in one sentence.

`ChunkCacheRequestError` is a mistake in one request (HTTP 400), `ChunkCacheConfigError` one in the server's own
configuration (refuse to start). Both read ``<json path>: <problem>; <remedy>``. What cannot happen is an assert, and
"not now" is a return value.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

ErrorT = TypeVar("ErrorT", bound=Exception)


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers above 4300 digits.
        return "a huge integer" if x.bit_length() > 256 else super().repr_int(x, level)

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 40


class ChunkCacheRequestError(ValueError):
    """A request that breaks the contract; the message names the JSON path and the remedy."""


class ChunkCacheConfigError(ValueError):
    """A server option that breaks the contract; the message names the option and the remedy."""


def user_error(kind: type[ErrorT], path: str, problem: str, remedy: str) -> ErrorT:
    """The error to raise: ``kind`` with the message ``<path>: <problem>; <remedy>``."""
    return kind(f"{path}: {problem}; {remedy}")


def request_error(path: str, problem: str, remedy: str) -> ChunkCacheRequestError:
    """A user's mistake in a request."""
    return user_error(ChunkCacheRequestError, path, problem, remedy)


def config_error(path: str, problem: str, remedy: str) -> ChunkCacheConfigError:
    """A user's mistake in the server's configuration."""
    return user_error(ChunkCacheConfigError, path, problem, remedy)


def one_line(error: Exception) -> str:
    """What an error says, without line breaks, to stand in a sentence."""
    return " ".join(str(error).split())


def is_unicode(text: str) -> bool:
    """Whether a text from outside can be tokenized: JSON may hold half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show(value: object) -> str:
    """`repr` of a value from outside, cut so that a message stays one readable sentence; constants are JSON's."""
    return _SHORT.repr(value)


def known_names(name: object, known: Iterable[str], kind: str = "keys") -> str:
    """The remedy for an unknown name: the one that was perhaps meant, and all known ones."""
    known = list(known)
    close = difflib.get_close_matches(str(name)[:100].lower(), known, n=1, cutoff=0.82)
    return "".join(f"did you mean {one}? " for one in close) + f"known {kind}: {', '.join(known)}"


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object from outside that have a value: typed clients write null for what they do not give."""
    return {name: value for name, value in fields.items() if value is not None}
