"""The chunk index: which variants of which chunks exist, and where.

    add           remember a variant; the same KV is never remembered twice
    lookup        the best variant of a chunk that is still stored; forgets those that are gone
    touch         a variant was used
    discard, discard_home, clear   forget

The index stores no KV and protects nothing from eviction: the radix tree does both. It has bounds of its own (variants,
variants per chunk, remembered path tokens) and its own order: derived variants go before exact ones, then the least
recently used by a logical clock. No wall clock and no set order, so equal calls give equal results on every rank.
Every operation is O(variants per chunk), amortised over what it forgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeAlias

from chunk_cache.paths import PathLedger
from chunk_cache.statistics import ChunkStatistics
from chunk_cache.types import REASONS
from chunk_cache.variant import Home, NodeHome, PathHome, PathTokens, Variant

Resolve: TypeAlias = Callable[[Variant], int]
"""How many leading tokens of the variant are still stored; 0 = gone."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is stored of one chunk."""

    variant: Variant | None
    covered_len: int
    """Leading tokens of the chunk that are stored; 0 without a variant."""
    reason: str | None
    """Why there is no variant; None when there is one."""

    def __post_init__(self) -> None:
        assert (self.variant is None) == (self.covered_len == 0), f"{self.covered_len} tokens of {self.variant}"
        assert (self.variant is None) == (self.reason is not None), f"variant {self.variant}, reason {self.reason}"
        assert self.reason is None or self.reason in REASONS, f"unknown reason {self.reason!r}"


_NOT_STORED = Lookup(None, 0, "not_stored")
_EVICTED = Lookup(None, 0, "evicted")
_GENERATION_LIMIT = Lookup(None, 0, "generation_limit")


@dataclass(slots=True)
class IndexCounters:
    """What happened since the index was made; counts only grow."""

    num_added: int = 0
    num_refreshed: int = 0
    """Already represented: nothing was added, at most its home moved."""
    num_refused: int = 0
    num_superseded: int = 0
    """Derived variants replaced by a better one of the same context."""
    num_dropped_per_chunk: int = 0
    num_dropped_variants: int = 0
    num_dropped_paths: int = 0
    num_gone: int = 0
    """Variants a lookup found no longer stored."""
    num_discarded: int = 0
    num_lookups: int = 0
    num_full: int = 0
    num_partial: int = 0


class ChunkIndex:
    """Variants by chunk key, bounded.

    Args:
        max_variants: of all chunks together.
        max_variants_per_chunk: of one chunk; the highest generation goes first, then the least recently used.
        max_path_tokens: tokens of remembered paths (8 bytes each); the least recently used path goes first.
    """

    def __init__(self, max_variants: int, max_variants_per_chunk: int, max_path_tokens: int) -> None:
        assert min(max_variants, max_variants_per_chunk, max_path_tokens) >= 1, "every bound must be at least 1"
        self.max_variants = max_variants
        self.max_variants_per_chunk = max_variants_per_chunk
        self.max_path_tokens = max_path_tokens
        self.counters = IndexCounters()
        self._by_key: dict[bytes, list[Variant]] = {}
        # least recently used first; two orders, so that the derived ones can go before the exact ones
        self._exact: OrderedDict[int, Variant] = OrderedDict()
        self._derived: OrderedDict[int, Variant] = OrderedDict()
        self._paths = PathLedger()
        self._nodes: dict[NodeHome, int] = {}
        self._next_id = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._exact) + len(self._derived)

    def __iter__(self) -> Iterator[Variant]:
        """All variants, derived before exact, each least recently used first: the order in which they go."""
        yield from self._derived.values()
        yield from self._exact.values()

    @property
    def num_chunks(self) -> int:
        return len(self._by_key)

    @property
    def num_paths(self) -> int:
        return len(self._paths)

    @property
    def num_path_tokens(self) -> int:
        return self._paths.total_tokens

    def get(self, variant_id: int) -> Variant | None:
        return self._exact.get(variant_id) or self._derived.get(variant_id)

    def wants(self, key: bytes, *, start: int, generation: int, context: tuple[bytes, ...]) -> bool:
        """Whether `add` would take a home for this KV, so that nobody inserts a node the index then refuses."""
        peers = self._by_key.get(key, ())
        if generation and any(peer.is_exact and peer.context == context for peer in peers):
            return False
        same = _find_same(peers, start, context)
        if same is not None:
            return same.generation >= generation
        return len(peers) < self.max_variants_per_chunk or generation <= max(p.generation for p in peers)

    def add(
        self,
        key: bytes,
        *,
        length: int,
        start: int,
        generation: int,
        context: tuple[bytes, ...],
        home: Home,
        statistics: ChunkStatistics | None = None,
    ) -> Variant | None:
        """Remember a variant.

        A KV of the same context and start is represented once: it is refreshed and moves to the new home, which was
        stored a moment ago while the old one may be gone. Of different generations the lower one stays. A derived
        variant is refused where an exact one of the same context exists, and goes when one arrives.

        Returns:
            The variant that now lives in `home`, or None when `home` was not taken: a better variant stands for this
            KV, the chunk's bound holds only better ones, or the path alone exceeds its bound.
        """
        _check_new(length, start, generation, home)
        if not self._fits(home) or not self.wants(key, start=start, generation=generation, context=context):
            self.counters.num_refused += 1
            return None
        peers = self._by_key.get(key, ())
        same = _find_same(peers, start, context)
        if same is not None and same.generation == generation:
            self._move(same, home)
            self._refresh(same)
            if statistics is not None:
                same.statistics = statistics.filled_from(same.statistics)
            self.counters.num_refreshed += 1
            return same
        for peer in [p for p in peers if p.generation and p.context == context and (p is same or not generation)]:
            self._remove(peer)
            self.counters.num_superseded += 1
        self._make_room(key, home)
        variant = Variant(self._next_id, key, length, start, generation, context, home, statistics=statistics)
        self._next_id += 1
        self._insert(variant)
        self.counters.num_added += 1
        return variant

    def lookup(self, key: bytes, resolve: Resolve, *, max_generation: int | None = None) -> Lookup:
        """The best variant of a chunk: stored in full, then lowest generation, then most recently used.

        Variants that `resolve` finds gone are forgotten. The use is not counted: call `touch` when it is used.

        Args:
            max_generation: variants above it are passed over, with reason ``generation_limit``.
        """
        self.counters.num_lookups += 1
        peers = self._by_key.get(key)
        if peers is None:
            return _NOT_STORED
        best: Variant | None = None
        best_len = 0
        limited = False
        for variant in sorted(peers, key=_preference):
            if max_generation is not None and variant.generation > max_generation:
                limited = True
                break
            covered_len = resolve(variant)
            assert 0 <= covered_len <= variant.length, f"{covered_len} tokens stored of {variant}"
            if covered_len == 0:
                self._remove(variant)
                self.counters.num_gone += 1
            elif covered_len > best_len:
                best, best_len = variant, covered_len
                if covered_len == variant.length:
                    break
        if best is None:
            return _GENERATION_LIMIT if limited else _EVICTED
        if best_len == best.length:
            self.counters.num_full += 1
        else:
            self.counters.num_partial += 1
        return Lookup(best, best_len, None)

    def touch(self, variant: Variant) -> bool:
        """Count a use; False when the variant has left the index meanwhile."""
        if self.get(variant.variant_id) is not variant:
            return False
        variant.num_uses += 1
        self._refresh(variant)
        return True

    def discard(self, variant_id: int) -> bool:
        """Forget one variant; False when it is not there."""
        variant = self.get(variant_id)
        if variant is None:
            return False
        self._remove(variant)
        self.counters.num_discarded += 1
        return True

    def discard_home(self, home: PathTokens | NodeHome) -> int:
        """Forget what lives in a path or a node; returns how many variants that were."""
        if isinstance(home, PathTokens):
            variant_ids = self._paths.holders(home)
        else:
            variant_ids = [self._nodes[home]] if home in self._nodes else []
        return sum(self.discard(variant_id) for variant_id in variant_ids)

    def clear(self) -> None:
        """Forget everything (a flushed cache); counters, clock and ids go on."""
        self.counters.num_discarded += len(self)
        self._by_key.clear()
        self._exact.clear()
        self._derived.clear()
        self._paths.clear()
        self._nodes.clear()

    def stats(self) -> dict[str, int]:
        """Sizes and counters, for metrics and logs."""
        sizes = {
            "num_variants": len(self),
            "num_exact": len(self._exact),
            "num_derived": len(self._derived),
            "num_chunks": self.num_chunks,
            "num_paths": self.num_paths,
            "num_path_tokens": self.num_path_tokens,
        }
        return sizes | asdict(self.counters)

    def check_integrity(self, resolve: Resolve | None = None) -> None:
        """Recompute every derived structure from scratch and compare.

        Args:
            resolve: when given, every variant is resolved too.

        Raises:
            AssertionError: something does not agree; the message says what.
        """
        variants = list(self)
        assert len({v.variant_id for v in variants}) == len(variants), "a variant is listed twice"
        assert len(variants) <= self.max_variants, f"{len(variants)} variants, the bound is {self.max_variants}"
        assert self.num_path_tokens <= self.max_path_tokens, f"{self.num_path_tokens} path tokens are over the bound"
        self._check_orders()
        self._check_chunks(variants)
        paths: dict[PathTokens, set[int]] = {}
        nodes: dict[NodeHome, int] = {}
        for v in variants:
            _check_new(v.length, v.start, v.generation, v.home)
            if isinstance(v.home, PathHome):
                paths.setdefault(v.home.path, set()).add(v.variant_id)
            else:
                assert v.home not in nodes, f"{v.home} is the home of two variants"
                nodes[v.home] = v.variant_id
            covered_len = resolve(v) if resolve else 0
            assert 0 <= covered_len <= v.length, f"{covered_len} tokens stored of {v}"
        self._paths.check_integrity(paths)
        assert self._nodes == nodes, f"nodes are {self._nodes}, variants say {nodes}"

    def _check_orders(self) -> None:
        for name, order, exact in (("exact", self._exact, True), ("derived", self._derived, False)):
            previous = 0
            for variant_id, variant in order.items():
                assert variant.variant_id == variant_id < self._next_id, f"{variant} is listed as {variant_id}"
                assert variant.is_exact == exact, f"{variant} is listed as {name}"
                assert previous < variant.last_use <= self._clock, f"{variant} is out of order in {name}"
                previous = variant.last_use

    def _check_chunks(self, variants: Iterable[Variant]) -> None:
        by_key: dict[bytes, set[int]] = {}
        for variant in variants:
            by_key.setdefault(variant.key, set()).add(variant.variant_id)
        listed = {key: {v.variant_id for v in peers} for key, peers in self._by_key.items()}
        assert listed == by_key, f"chunks list {listed}, variants say {by_key}"
        for peers in self._by_key.values():
            assert len(peers) <= self.max_variants_per_chunk, f"{len(peers)} variants of one chunk: {peers}"
            assert len({v.variant_id for v in peers}) == len(peers), f"a chunk lists a variant twice: {peers}"
            assert len({v.length for v in peers}) == 1, f"one key, different lengths: {peers}"
            assert len({(v.start, v.context) for v in peers}) == len(peers), f"one KV is represented twice: {peers}"
            exact = {v.context for v in peers if v.is_exact}
            assert not any(v.generation and v.context in exact for v in peers), f"derived beside exact: {peers}"

    def _fits(self, home: Home) -> bool:
        return not isinstance(home, PathHome) or len(home.path) <= self.max_path_tokens

    def _refresh(self, variant: Variant) -> None:
        self._clock += 1
        variant.last_use = self._clock
        (self._exact if variant.is_exact else self._derived).move_to_end(variant.variant_id)
        if isinstance(variant.home, PathHome):
            self._paths.touch(variant.home.path)

    def _move(self, variant: Variant, home: Home) -> None:
        if home is variant.home:
            return
        self._leave_home(variant)
        variant.home = home
        self._enter_home(variant)
        # after entering: the new path is then the most recently used and fits, so it is never the one that goes
        self._shrink_paths(0)

    def _make_room(self, key: bytes, home: Home) -> None:
        peers = self._by_key.get(key, [])
        if len(peers) >= self.max_variants_per_chunk:
            self._remove(max(peers, key=_preference))
            self.counters.num_dropped_per_chunk += 1
        if isinstance(home, PathHome) and home.path not in self._paths:
            self._shrink_paths(len(home.path))
        while len(self) >= self.max_variants:
            self._remove(next(iter(self)))
            self.counters.num_dropped_variants += 1

    def _shrink_paths(self, num_new_tokens: int) -> None:
        while self._paths.total_tokens + num_new_tokens > self.max_path_tokens:
            self.counters.num_dropped_paths += 1
            for variant_id in self._paths.holders(self._paths.oldest()):
                variant = self.get(variant_id)
                assert variant is not None, f"a path is held by variant {variant_id}, which is not in the index"
                self._remove(variant)

    def _insert(self, variant: Variant) -> None:
        self._by_key.setdefault(variant.key, []).append(variant)
        (self._exact if variant.is_exact else self._derived)[variant.variant_id] = variant
        self._enter_home(variant)
        self._refresh(variant)

    def _remove(self, variant: Variant) -> None:
        peers = self._by_key[variant.key]
        peers.remove(variant)
        if not peers:
            del self._by_key[variant.key]
        del (self._exact if variant.is_exact else self._derived)[variant.variant_id]
        self._leave_home(variant)

    def _enter_home(self, variant: Variant) -> None:
        if isinstance(variant.home, PathHome):
            self._paths.hold(variant.home.path, variant.variant_id)
        else:
            assert variant.home not in self._nodes, f"{variant.home} is already the home of another variant"
            self._nodes[variant.home] = variant.variant_id

    def _leave_home(self, variant: Variant) -> None:
        if isinstance(variant.home, PathHome):
            self._paths.release(variant.home.path, variant.variant_id)
        else:
            del self._nodes[variant.home]


def _find_same(peers: Iterable[Variant], start: int, context: tuple[bytes, ...]) -> Variant | None:
    return next((peer for peer in peers if peer.start == start and peer.context == context), None)


def _preference(variant: Variant) -> tuple[int, int]:
    """Best first."""
    return variant.generation, -variant.last_use


def _check_new(length: int, start: int, generation: int, home: Home) -> None:
    assert length > 0, f"a chunk of {length} tokens"
    assert min(start, generation) >= 0, f"start {start}, generation {generation}"
    if isinstance(home, PathHome):
        assert generation == 0, f"a path holds exact KV only, not generation {generation}"
        assert home.start == start, f"at {home.start} in its path, but computed at {start}"
        assert start + length <= len(home.path), f"[{start}, {start + length}) is outside {home.path}"
    else:
        assert len(home.node_key) >= length, f"{home} is shorter than the chunk's {length} tokens"
