"""IndexQuota: what each partition has in the index, and which of it is evicted first.

    add, touch, remove   note that a variant came, was used, went
    hold, release        note that a variant lies in a path, or not any more
    first, order_of, oldest_path   name the victims of one partition
    largest              names the largest partitions, for statistics

Without a quota only sums are kept. With one, each partition also has a victim order and a path ledger for its own
variants; the index removes the victims that these name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chunk_cache.index.paths import PathLedger
from chunk_cache.index.quota import Shares
from chunk_cache.index.variant import PathTokens, Variant
from chunk_cache.index.victims import VictimOrder


@dataclass(slots=True)
class _Own:
    """The variants and paths of one partition."""

    order: VictimOrder
    paths: PathLedger = field(default_factory=PathLedger)


class IndexQuota:
    """See the head of this file.

    Args:
        max_variants, max_path_tokens: of the index.
        share: of these that one partition may have; 1 = there is no quota.
        new_order: makes a victim order like the index's.
    """

    def __init__(
        self, max_variants: int, max_path_tokens: int, share: float, new_order: Callable[[], VictimOrder]
    ) -> None:
        self.variants = Shares(max_variants, share)
        self.path_tokens = Shares(max_path_tokens, share)
        self._new_order = new_order
        self._own: dict[bytes, _Own] = {}

    def add(self, variant: Variant, age: float) -> None:
        """Args: age: of the index's own order."""
        self.variants.add(variant.holder.partition.key, 1)
        if self.variants.is_limited:
            order = self._own_of(variant).order
            order.age = age
            order.add(variant)

    def touch(self, variant: Variant, age: float) -> None:
        if self.variants.is_limited:
            own = self._own_of(variant)
            own.order.age = age
            own.order.touch(variant)
            if isinstance(variant.holder, PathTokens):
                own.paths.touch(variant.holder)

    def remove(self, variant: Variant) -> None:
        """Removes a variant that has already left its home."""
        owner = variant.holder.partition.key
        self.variants.remove(owner, 1)
        if self.variants.is_limited:
            self._own[owner].order.remove(variant)
            if not self.variants.held(owner):
                del self._own[owner]

    def hold(self, path: PathTokens, variant_id: int, num_new: int) -> None:
        """Args: num_new: tokens of the path, or 0 where another variant has it already."""
        owner = path.partition.key
        self.path_tokens.add(owner, num_new)
        if self.variants.is_limited:
            self._own[owner].paths.hold(path, variant_id)

    def release(self, path: PathTokens, variant_id: int, num_gone: int) -> None:
        """Args: num_gone: tokens of the path, or 0 where another variant still has it."""
        owner = path.partition.key
        self.path_tokens.remove(owner, num_gone)
        if self.variants.is_limited:
            self._own[owner].paths.release(path, variant_id)

    def first(self, owner: bytes) -> Variant:
        """The first victim of a partition."""
        return self._own[owner].order.first()

    def order_of(self, owner: bytes) -> Iterable[Variant]:
        """A partition's variants, in eviction order."""
        own = self._own.get(owner)
        return () if own is None else own.order

    def oldest_path(self, owner: bytes) -> PathTokens:
        """A partition's least recently used path."""
        return self._own[owner].paths.oldest()

    def largest(self) -> dict[str, dict[str, int]]:
        """What the largest partitions have, by name, the largest first."""
        return {"variants": self.variants.largest(), "path_tokens": self.path_tokens.largest()}

    def clear(self) -> None:
        self.variants.clear()
        self.path_tokens.clear()
        self._own.clear()

    def check_integrity(self, variants: Iterable[Variant], clock: int) -> None:
        """Compares with the variants of the index, in eviction order.

        Raises:
            AssertionError: a sum or an order is wrong, or a partition is above its share.
        """
        of: dict[bytes, list[Variant]] = {}
        paths: dict[bytes, dict[PathTokens, set[int]]] = {}
        for variant in variants:
            owner = variant.holder.partition.key
            of.setdefault(owner, []).append(variant)
            if isinstance(variant.holder, PathTokens):
                paths.setdefault(owner, {}).setdefault(variant.holder, set()).add(variant.variant_id)
        self.variants.check_integrity(Counter({owner: len(own) for owner, own in of.items()}))
        self.path_tokens.check_integrity({owner: sum(map(len, own)) for owner, own in paths.items()})
        assert not self.variants.above, f"partitions above their share of variants: {self.variants.above}"
        assert not self.path_tokens.above, f"partitions above their share of path tokens: {self.path_tokens.above}"
        if not self.variants.is_limited:
            assert not self._own, "there is no quota"
            return
        assert self._own.keys() == of.keys(), f"partitions {list(self._own)}, variants are of {list(of)}"
        for owner, own in self._own.items():
            own.order.check_integrity(clock)
            assert list(own.order) == of[owner], f"{list(own.order)} go in another order than {of[owner]}"
            own.paths.check_integrity(paths.get(owner, {}))

    def _own_of(self, variant: Variant) -> _Own:
        owner = variant.holder.partition.key
        own = self._own.get(owner)
        if own is None:
            own = self._own[owner] = _Own(self._new_order())
        return own
