"""Methods: which tokens of a reused chunk are recomputed. `METHODS` is the registry, `find_method` looks one up.

A new method is one file, one line in `METHODS` and one row in the docs (docs/methods.md shows an example).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from chunk_cache.errors import request_error, show
from chunk_cache.methods.base import Method, Ranking, Rows, Stage, num_rows_at
from chunk_cache.methods.fixed import Epic, Full, FullReuse, LegoLink, Near, Random, Seams
from chunk_cache.methods.method_options import Options, OptionValue
from chunk_cache.methods.near_words import NearWords
from chunk_cache.methods.ranked import H2O, CacheCraft
from chunk_cache.methods.scored import A3, CacheBlend, InfoFlow, QuestionDrift, QuestionMethod
from chunk_cache.methods.selected import STAND_IN, CacheClip

__all__ = [
    "METHODS",
    "METHODS_OF_ANY_SERVER",
    "STAND_IN",
    "STATE_METHODS",
    "Method",
    "OptionValue",
    "Options",
    "Ranking",
    "Rows",
    "Stage",
    "find_method",
    "num_rows_at",
]

_ALL: tuple[Method, ...] = (
    FullReuse(),
    Random(),
    Epic(),
    Near(),
    NearWords(),
    LegoLink(),
    Seams(),
    H2O(),
    CacheCraft(),
    CacheBlend("cacheblend"),
    A3("a3"),
    QuestionMethod("fusionrag"),
    InfoFlow("infoflow"),
    QuestionDrift("question-drift"),
    CacheClip(),
    Full(),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})
"""The methods, by the name a request uses."""

STATE_METHODS = (Seams.name, Full.name, FullReuse.name)
"""Names of the methods for models with states: these recompute runs, and reuse whole pieces between them."""
METHODS_OF_ANY_SERVER = tuple(name for name, method in METHODS.items() if not method.asks_selector)
"""Names of the methods that need no selector."""


def find_method(name: object, path: str) -> Method:
    """The method of that name.

    Raises:
        ChunkCacheRequestError: unknown; the message lists the known ones.
    """
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        problem = f"unknown method {show(name)}"
        raise request_error(path, problem, f"known methods: {', '.join(METHODS)}")
    return method
