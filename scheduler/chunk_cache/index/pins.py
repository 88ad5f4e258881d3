"""Pins: chunks whose KV is kept from eviction for a while, in one scheduler process.

Verbs: `pin` (all of the chunks or none), `unpin`, `expire` (unpin those whose time is over), `renew` (lock what a
variant moved to or was replaced by; call before every eviction), `forget_all` (the tree was emptied).

Promises: a pin is a lock of the store, which counts it as protected; no more than `max_tokens` are locked, counting
what lies in front of a chunk in its path; a lock is released exactly once, or dies with the tree. No clock is read
here, and nothing depends on the order of a set, so all tensor-parallel ranks keep the same pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.need import is_trusted
from chunk_cache.index.variant import NodeHome, PathTokens, Variant

MAX_PINNED_SHARE = 0.5
"""Share of the store's tokens that may be pinned; the rest is left to requests."""


class LockingStore(Protocol):
    """Where KV lies, and can be kept from eviction."""

    def resolve(self, variant: Variant) -> int:
        """Leading tokens of the variant that are still stored; 0 = gone."""

    def lock_chunk(self, variant: Variant) -> Any:
        """Locks the KV of a variant; the lock is an object of the store, and names the `node` that it keeps."""

    def unlock(self, lock: Any) -> None: ...

    def locked_len(self, locks: Iterable[Any]) -> int:
        """Tokens that these locks keep, each counted once."""

    def is_locked(self, node_id: Any) -> bool:
        """Whether anything locks this node."""


@dataclass(slots=True)
class _Pin:
    variant: Variant
    holder: PathTokens | NodeHome
    lock: Any
    until: float


@dataclass(frozen=True)
class PinResult:
    """What became of a call of `Pins.pin`.

    Attributes:
        pinned: leading tokens that are kept, of each chunk that is stored.
        num_tokens: tokens of the pool that all pins keep; if the call was refused, how many they would have kept.
        is_refused: these would have been more than the bound, so nothing was pinned.
    """

    pinned: dict[bytes, int]
    num_tokens: int
    is_refused: bool


class Pins:
    """See the head of this file.

    Args:
        max_tokens: tokens of the pool that may be pinned.
        is_trust_limited: whether only variants are used, and so pinned, that others cannot have steered.
    """

    def __init__(
        self, index: ChunkIndex, store: LockingStore, max_tokens: int, *, is_trust_limited: bool = False
    ) -> None:
        self.max_tokens = max_tokens
        self.num_lost = 0
        self._index = index
        self._store = store
        self._is_trust_limited = is_trust_limited
        self._pins: dict[bytes, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pool that are kept; what two pins share counts once."""
        return self._store.locked_len(pin.lock for pin in self._pins.values())

    def until(self, variant: Variant) -> float | None:
        """Until when this variant is pinned, or None."""
        pin = self._pins.get(variant.key)
        return pin.until if pin is not None and pin.variant is variant else None

    def pin(self, keys: Sequence[bytes], until: float, has_room: Callable[[], bool] = lambda: True) -> PinResult:
        """Pins the best stored variant of each chunk; a chunk that is pinned twice stays until the later time.

        Args:
            has_room: whether the pool has room enough besides pins; if not, nothing is pinned.
        """
        self.renew()
        best = self._best_of(keys)
        added = [key for key in best if key not in self._pins]
        for key in added:
            variant = best[key]
            self._pins[key] = _Pin(variant, variant.holder, self._store.lock_chunk(variant), until)
        num_tokens = self.num_tokens
        if added and (num_tokens > self.max_tokens or not has_room()):
            for key in added:
                self._release(key)
            return PinResult({}, num_tokens, is_refused=True)
        for key in best:
            self._pins[key].until = max(self._pins[key].until, until)
        pinned = {key: self._store.resolve(self._pins[key].variant) for key in best}
        return PinResult(pinned, num_tokens, is_refused=False)

    def unpin(self, keys: Iterable[bytes] | None = None) -> list[bytes]:
        """Unpins these chunks, or all; returns which of them were pinned."""
        known = [key for key in (list(self._pins) if keys is None else keys) if key in self._pins]
        for key in known:
            self._release(key)
        return known

    def expire(self, until: float) -> list[bytes]:
        """Unpins the chunks that are pinned until `until` or earlier; returns them."""
        return self.unpin([key for key, pin in self._pins.items() if pin.until <= until])

    def renew(self) -> None:
        """Locks what variants moved to or were replaced by; unpins chunks that the index has dropped, or that take more
        tokens now than may be pinned."""
        stale = [key for key, pin in self._pins.items() if not self._is_current(pin)]
        if not stale:
            return
        best = self._best_of(stale)
        for key in stale:
            pin, variant = self._pins[key], best.get(key)
            lock = None if variant is None else self._store.lock_chunk(variant)
            self._release(key)
            if variant is not None:
                self._pins[key] = _Pin(variant, variant.holder, lock, pin.until)
                if self.num_tokens > self.max_tokens:
                    self._release(key)
            self.num_lost += key not in self._pins

    def forget_all(self) -> None:
        """Forgets all pins: the tree was emptied, and its locks with it."""
        self._pins.clear()

    def stats(self) -> dict[str, int]:
        """Sizes and counters."""
        return {
            "num_pins": len(self),
            "num_tokens": self.num_tokens,
            "max_tokens": self.max_tokens,
            "num_lost": self.num_lost,
        }

    def check_integrity(self) -> None:
        """Compares with the index and the tree.

        Raises:
            AssertionError: a pin does not keep what it should.
        """
        self.renew()
        for key, pin in self._pins.items():
            assert pin.variant.key == key, f"{pin.variant} is pinned under {key.hex()}"
            assert self._store.resolve(pin.variant), f"{pin.variant} is pinned and gone"
            assert self._store.is_locked(pin.lock.node), f"{pin.variant} is pinned and not locked"

    def _is_current(self, pin: _Pin) -> bool:
        return self._index.get(pin.variant.variant_id) is pin.variant and pin.variant.holder is pin.holder

    def _release(self, key: bytes) -> None:
        self._store.unlock(self._pins.pop(key).lock)

    def _best_of(self, keys: Iterable[bytes]) -> dict[bytes, Variant]:
        """The best variant of each chunk: most tokens, then lowest generation, then most recent use."""
        best: dict[bytes, tuple[tuple[int, int, int], Variant]] = {}
        for key, variants in variants_of(self._index, keys).items():
            for variant in variants:
                if self._is_trust_limited and not is_trusted(variant):
                    continue
                covered_len = self._store.resolve(variant)
                rank = (covered_len, -variant.generation, variant.last_use)
                if covered_len and (key not in best or rank > best[key][0]):
                    best[key] = rank, variant
        return {key: variant for key, (_, variant) in best.items()}


def variants_of(index: ChunkIndex, keys: Iterable[bytes]) -> dict[bytes, list[Variant]]:
    """The variants of each of these chunks that the index has, in the order of the keys."""
    return {key: variants for key in keys if (variants := index.variants_of(key))}
