"""VariantTable: the variants of a chunk index, and all that is derived from them.

    insert, remove, clear   add or remove a variant; remove all
    refresh, use, move      make a variant the most recently used; count a use; give it another home
    note_gone, gone         note why a chunk has no variant any more; find variants that the store has evicted

The `ChunkIndex` that owns the table decides what comes and goes, and keeps its bounds. It reads the parts of the table;
only these methods change them, so that all parts agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from chunk_cache.index.index_quota import IndexQuota
from chunk_cache.index.lookup import Resolve
from chunk_cache.index.paths import PathLedger
from chunk_cache.index.peers import check_peers
from chunk_cache.index.variant import NodeHome, PathTokens, Variant, check_home
from chunk_cache.index.victims import VictimOrder

MAX_GONE_KEYS = 4096
"""Most chunks without a variant whose reason is remembered, the newest; lookups report it."""


class VariantTable:
    """See the head of this file.

    Args:
        order: the eviction order, empty.
        quota: of the partitions, empty.
    """

    def __init__(self, order: VictimOrder, quota: IndexQuota) -> None:
        self.order = order
        self.quota = quota
        self.by_key: dict[bytes, list[Variant]] = {}
        self.paths = PathLedger()
        self.gone_keys: dict[bytes, str] = {}
        """Chunks that have lost their last variant, each with the reason, the newest last."""
        self.num_derived = 0
        self.num_derived_tokens = 0
        self.num_reused_tokens = 0
        self._turns: deque[int] = deque()  # ids of all variants, each once, and of some that are gone
        self._clock = 0

    def living_in(self, path: PathTokens) -> list[Variant]:
        """The variants in a path, in the order in which they came."""
        found = []
        for variant_id in self.paths.holders(path):
            variant = self.order.get(variant_id)
            assert variant is not None, f"a path is held by variant {variant_id}, which is not in the index"
            found.append(variant)
        return found

    def insert(self, variant: Variant) -> None:
        self.by_key.setdefault(variant.key, []).append(variant)
        self._clock += 1
        variant.last_use = self._clock
        self.order.add(variant)
        self.quota.add(variant, self.order.age)
        self.num_derived += not variant.is_exact
        self.num_derived_tokens += _derived_len(variant)
        self._enter_home(variant)
        self.gone_keys.pop(variant.key, None)
        self._turns.append(variant.variant_id)

    def remove(self, variant: Variant, *, is_victim: bool = False) -> None:
        """Args: is_victim: it is evicted by the order, whose age then rises to its worth."""
        peers = self.by_key[variant.key]
        peers.remove(variant)
        if not peers:
            del self.by_key[variant.key]
        (self.order.forget if is_victim else self.order.remove)(variant)
        self.num_derived -= not variant.is_exact
        self.num_derived_tokens -= _derived_len(variant)
        self.num_reused_tokens -= variant.length if variant.num_uses else 0
        self._leave_home(variant)
        self.quota.remove(variant)
        if len(self._turns) > 2 * len(self.order) + 64:
            self._turns = deque(variant_id for variant_id in self._turns if self.order.get(variant_id) is not None)

    def refresh(self, variant: Variant) -> None:
        """The variant becomes the most recently used, as does its path."""
        self._clock += 1
        variant.last_use = self._clock
        self.order.touch(variant)
        self.quota.touch(variant, self.order.age)
        if isinstance(variant.holder, PathTokens):
            self.paths.touch(variant.holder)

    def use(self, variant: Variant, weight: float) -> None:
        """Args: weight: what the use adds to the reuse frequency f_r."""
        if not variant.num_uses:
            self.num_reused_tokens += variant.length
        variant.num_uses += 1
        variant.reuse_frequency += weight
        self.refresh(variant)

    def move(self, variant: Variant, holder: PathTokens | NodeHome, path_start: int) -> None:
        """Gives a variant another home; if that is a path, the path becomes the most recently used."""
        self._leave_home(variant)
        variant.holder, variant.path_start = holder, path_start
        self._enter_home(variant)

    def note_gone(self, key: bytes, reason: str) -> None:
        """Notes why a chunk has no variant any more; does nothing if it still has one."""
        if key not in self.by_key:
            self.gone_keys[key] = reason
            if len(self.gone_keys) > MAX_GONE_KEYS:
                del self.gone_keys[next(iter(self.gone_keys))]

    def gone(self, resolve: Resolve, num_turns: int) -> Iterator[Variant]:
        """Yields those of the next `num_turns` variants that `resolve` finds gone; the caller removes each at once."""
        for _ in range(min(num_turns, len(self._turns))):
            if not self._turns:
                break  # removing a variant may also drop turns of variants that are gone
            variant = self.order.get(self._turns.popleft())
            if variant is None:
                continue
            if resolve(variant):
                self._turns.append(variant.variant_id)
            else:
                yield variant

    def clear(self, why: str | None) -> None:
        """Args: why: the reason to note of these chunks; None = they never were stored."""
        self.gone_keys = {} if why is None else dict.fromkeys(list(self.by_key)[-MAX_GONE_KEYS:], why)
        for variant in self.order:
            if isinstance(variant.holder, NodeHome):
                variant.holder.variant_id = -1
        self.by_key.clear()
        self.order.clear()
        self.num_derived = self.num_derived_tokens = self.num_reused_tokens = 0
        self.paths.clear()
        self.quota.clear()
        self._turns.clear()

    def check_integrity(self, max_per_chunk: int) -> None:
        """Raises an `AssertionError` where something is not what the variants say it should be."""
        variants = list(self.order)
        assert len({v.variant_id for v in variants}) == len(variants), "a variant is listed twice"
        self.order.check_integrity(self._clock)
        self.quota.check_integrity(variants, self._clock)
        kept = self.num_derived, self.num_derived_tokens, self.num_reused_tokens
        reused_len = sum(v.length for v in variants if v.num_uses)
        counted = sum(not v.is_exact for v in variants), sum(map(_derived_len, variants)), reused_len
        assert kept == counted, f"derived variants, their tokens, reused tokens are {kept}, from scratch {counted}"
        check_peers(self.by_key, variants, max_per_chunk)
        turns = sorted(variant_id for variant_id in self._turns if self.order.get(variant_id) is not None)
        assert turns == sorted(v.variant_id for v in variants), f"turns {turns} are not those of the variants"
        assert len(self._turns) <= 2 * len(variants) + 64, f"{len(self._turns)} turns of {len(variants)} variants"
        assert self.by_key.keys().isdisjoint(self.gone_keys), "a chunk is stored and gone"
        paths: dict[PathTokens, set[int]] = {}
        for v in variants:
            check_home(v.home, v.length, v.start, v.generation)
            if isinstance(v.holder, PathTokens):
                paths.setdefault(v.holder, set()).add(v.variant_id)
            else:
                assert v.holder.variant_id == v.variant_id, f"{v.holder} belongs to {v.holder.variant_id}, not to {v}"
        self.paths.check_integrity(paths)

    def _enter_home(self, variant: Variant) -> None:
        holder = variant.holder
        if isinstance(holder, PathTokens):
            before = self.paths.total_tokens
            self.paths.hold(holder, variant.variant_id)
            self.quota.hold(holder, variant.variant_id, self.paths.total_tokens - before)
        else:
            assert holder.variant_id < 0, f"{holder} is already the home of another variant"
            holder.variant_id = variant.variant_id

    def _leave_home(self, variant: Variant) -> None:
        if isinstance(variant.holder, PathTokens):
            before = self.paths.total_tokens
            self.paths.release(variant.holder, variant.variant_id)
            self.quota.release(variant.holder, variant.variant_id, before - self.paths.total_tokens)
        else:
            variant.holder.variant_id = -1


def _derived_len(variant: Variant) -> int:
    """Tokens that count as derived; prepared variants do not."""
    return 0 if variant.is_exact or variant.is_prepared else variant.length
