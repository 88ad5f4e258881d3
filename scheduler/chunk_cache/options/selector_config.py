"""The key `selector` of `--chunk-cache-config`: how the auxiliary model of `--chunk-cache-selector` runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunk_cache.errors import config_error, show
from chunk_cache.options.config_object import parse_seconds, parsed_fields
from chunk_cache.options.tier_config import parse_bytes


def _threads(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1024:
        problem = f"{show(value)} is not an integer in [0, 1024]"
        raise config_error(path, problem, "give a number of threads, or 0 for half of the cores")
    return value


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """How the selector runs; the defaults are the documentation's."""

    timeout_s: float = field(default=5.0, metadata={"parse": parse_seconds})
    """Longest time that a request waits for its scores; then `near` chooses."""
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
    return SelectorConfig(**parsed_fields(SelectorConfig, value, path))
