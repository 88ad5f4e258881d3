"""The key `selector` of `--chunk-cache-config`: how the auxiliary model of `--chunk-cache-selector` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from chunk_cache.errors import ChunkCacheConfigError, show, user_error
from chunk_cache.tier_config import parse_bytes


def _seconds(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value < float("inf"):
        problem = f"{show(value)} is not a number of at least 0.001"
        raise user_error(ChunkCacheConfigError, path, problem, "give a number of seconds")
    return float(value)


def _threads(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1024:
        problem = f"{show(value)} is not an integer in [0, 1024]"
        raise user_error(ChunkCacheConfigError, path, problem, "give a number of threads, or 0 for half of the cores")
    return value


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """How the selector runs; the defaults are the documentation's."""

    timeout_s: float = field(default=5.0, metadata={"parse": _seconds})
    """A request waits no longer for its scores; `STAND_IN` chooses then."""
    max_bytes: int = field(default=2_000_000_000, metadata={"parse": parse_bytes})
    """Keys and values of chunks that its process keeps, besides those of the request at hand."""
    num_threads: int = field(default=0, metadata={"parse": _threads})
    """Threads that compute; 0 = half of the cores that the server may use."""


def parse_selector(value: object, path: str) -> SelectorConfig:
    """Check the value of the key.

    Args:
        path: where it stood, for messages.

    Raises:
        ChunkCacheConfigError: not an object, an unknown key, or a value outside its range.
    """
    parsers: dict[str, Callable[[object, str], object]] = {
        key.name: key.metadata["parse"] for key in fields(SelectorConfig)
    }
    if not isinstance(value, Mapping):
        remedy = f"give an object with some of {', '.join(parsers)}"
        raise user_error(ChunkCacheConfigError, path, f"{show(value)} is not an object", remedy)
    for key in value:
        if key not in parsers:
            remedy = f"known keys: {', '.join(parsers)}"
            raise user_error(ChunkCacheConfigError, f"{path}.{key}", f"unknown key {show(key)}", remedy)
    return SelectorConfig(**{key: parsers[key](item, f"{path}.{key}") for key, item in value.items()})  # type: ignore[arg-type]
