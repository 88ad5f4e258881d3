"""Methods: which tokens of a reused chunk are recomputed.

`find_method` looks one up, `check_options` checks its parameters, `effective_ratio` settles its budget and
`rows_for_chunk` chooses. A choice depends on its arguments only, so every tensor-parallel rank and every retry agrees.
A new method is one class, one line in `METHODS` and one row in the docs.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from chunk_cache.errors import ChunkCacheRequestError, show, user_error

Rows: TypeAlias = npt.NDArray[np.int64]
Options: TypeAlias = tuple[tuple[str, int], ...]
"""A method's parameters as (name, value), sorted by name."""

_INTEGER_TOLERANCE = 1e-9  # far above the rounding of ratio * n (1e-16 relative), far below one token


@dataclass(frozen=True, slots=True)
class IntOption:
    """One integer parameter of a method, `minimum` <= value <= `maximum`."""

    name: str
    default: int
    minimum: int
    maximum: int

    def check(self, value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            problem = f"{show(value)} is not an integer in [{self.minimum}, {self.maximum}]"
            raise user_error(ChunkCacheRequestError, path, problem, "give an integer in that range")
        return value


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """A way to choose rows. Stateless; one instance serves all requests."""

    name: ClassVar[str]
    options_schema: ClassVar[tuple[IntOption, ...]] = ()

    def effective_ratio(self, requested: float | None, default: float) -> float:
        """The recompute ratio in [0, 1] that is really used: the request's, else the server's."""
        return default if requested is None else requested

    def rows_for_chunk(
        self, offset_len: int, num_reused: int, ratio: float, *, seed: int = 0, chunk_key: bytes = b""
    ) -> Rows:
        """The tokens of one reused chunk that are computed again.

        Args:
            offset_len: tokens of the chunk in front of the reused part (they lie in the exact prefix).
            num_reused: tokens of the chunk that are brought in.
            ratio: the effective ratio; 1.0 selects all rows whatever the method.
            seed: the request's ``options.seed``, for methods that draw lots.
            chunk_key: the chunk's key, so that different chunks draw differently.

        Returns:
            Sorted offsets in ``[0, num_reused)``, counted from the first reused token; shape [num_selected].
        """
        assert min(offset_len, num_reused) >= 0, f"negative length: {offset_len}, {num_reused}"
        num_rows = num_rows_at(ratio, num_reused)
        if num_rows in (0, num_reused):
            return np.arange(num_rows, dtype=np.int64)
        return self._select(num_reused, num_rows, seed, chunk_key)

    @abstractmethod
    def _select(self, num_reused: int, num_rows: int, seed: int, chunk_key: bytes) -> Rows:
        """`num_rows` sorted offsets, 0 < num_rows < num_reused."""

    def check_options(self, options: Mapping[str, object], path: str) -> Options:
        """The given parameters, checked and sorted; those left out keep their default.

        Raises:
            ChunkCacheRequestError: a name this method does not have, or a value outside its range.
        """
        schema = {option.name: option for option in self.options_schema}
        for name in options:
            if name not in schema:
                known = ", ".join(schema) or "none"
                problem = f"unknown key {show(name)} for method {self.name!r}"
                raise user_error(ChunkCacheRequestError, path, problem, f"known keys: {known}")
        return tuple(sorted((name, schema[name].check(value, f"{path}.{name}")) for name, value in options.items()))


class FullReuse(Method):
    """Position shift only: nothing is recomputed."""

    name = "full-reuse"

    def effective_ratio(self, requested: float | None, default: float) -> float:
        return 0.0

    def _select(self, num_reused: int, num_rows: int, seed: int, chunk_key: bytes) -> Rows:
        return np.arange(0, dtype=np.int64)


class Full(Method):
    """Everything is recomputed: what every method is at ratio 1.0."""

    name = "full"

    def effective_ratio(self, requested: float | None, default: float) -> float:
        return 1.0

    def _select(self, num_reused: int, num_rows: int, seed: int, chunk_key: bytes) -> Rows:
        return np.arange(num_reused, dtype=np.int64)


class Epic(Method):
    """LegoLink (EPIC): the first ceil(ratio n) tokens, where a chunk's false attention sink lies."""

    name = "epic"

    def _select(self, num_reused: int, num_rows: int, seed: int, chunk_key: bytes) -> Rows:
        return np.arange(num_rows, dtype=np.int64)


class Random(Method):
    """Baseline: ceil(ratio n) tokens drawn without replacement, from (seed, chunk key, n) alone.

    With the same seed a larger ratio selects a superset, so that curves over the ratio are not noise.
    """

    name = "random"
    options_schema = (IntOption("seed", default=0, minimum=0, maximum=2**63 - 1),)

    def _select(self, num_reused: int, num_rows: int, seed: int, chunk_key: bytes) -> Rows:
        message = seed.to_bytes(8, "little") + num_reused.to_bytes(8, "little") + chunk_key
        base = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
        # the words are all different, so this set is unique whichever algorithm numpy picks
        chosen = np.argpartition(_hash_counters(base, num_reused), num_rows)[:num_rows]
        return np.sort(chosen).astype(np.int64, copy=False)


METHODS: Mapping[str, Method] = MappingProxyType({m.name: m for m in (FullReuse(), Random(), Epic(), Full())})
"""The methods that are built, by the name a request uses."""

NOT_BUILT = frozenset({"cacheblend", "cache-craft", "a3", "fusionrag", "cacheclip", "h2o"})
"""Names the contract reserves; refused like an unknown one until they are built."""


def find_method(name: object, path: str) -> Method:
    """The method of that name.

    Raises:
        ChunkCacheRequestError: unknown, or not built yet; the message lists the known ones.
    """
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        problem = f"unknown method {show(name)}"
        raise user_error(ChunkCacheRequestError, path, problem, f"known methods: {', '.join(METHODS)}")
    return method


def num_rows_at(ratio: float, num_tokens: int) -> int:
    """ceil(ratio * num_tokens) without floating-point surprises: 0.07 of 100 is 7, not 8; above 0 at least one."""
    assert 0.0 <= ratio <= 1.0, f"ratio {ratio} outside [0, 1]"
    if ratio == 0.0 or num_tokens == 0:
        return 0
    exact = ratio * num_tokens
    nearest = round(exact)
    close = abs(exact - nearest) <= _INTEGER_TOLERANCE * max(1.0, exact)
    return min(num_tokens, max(1, nearest if close else math.ceil(exact)))


def _hash_counters(base: int, num: int) -> npt.NDArray[np.uint64]:
    """`num` pseudo-random words, all different: SplitMix64 (Steele et al. 2014), a bijection over a counter.

    Ours rather than numpy's generator: its stream may change between numpy versions, and seeding it costs more.
    """
    words = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(base)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
