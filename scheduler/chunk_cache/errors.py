"""A user's mistake, told in one sentence.

`ChunkCacheRequestError` is a mistake in one request (HTTP 400), `ChunkCacheConfigError` one in the server's own
configuration (refuse to start). Both read ``<json path>: <problem>; <remedy>``. Everything else that cannot happen is
an assert, and "not now" is a return value.
"""

from __future__ import annotations

import reprlib
from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=Exception)


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers above 4300 digits.
        return "a huge integer" if x.bit_length() > 256 else super().repr_int(x, level)


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


def is_unicode(text: str) -> bool:
    """Whether a text from outside can be tokenized: JSON may hold half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show(value: object) -> str:
    """`repr` of a value from outside, cut so that a message stays one readable sentence."""
    return _SHORT.repr(value)
