"""The chunk index: which variants of which chunks exist, and where.

    add           remembers a variant; the same KV is never remembered twice
    lookup        finds the best variant of a chunk that is still stored; forgets those that are gone
    touch         counts a use of a variant
    move          gives a variant another home
    describe      adds the statistics of a variant
    sweep         forgets some variants that the store has evicted
    discard, clear   forget one variant, or all

The index stores no KV and protects nothing from eviction: the radix tree does both. It has its own bounds (variants,
variants per chunk, remembered path tokens) and its own eviction order (`victims`), by a logical clock. No result
depends on a wall clock or on the order of a set, so equal calls give equal results on every rank. Every operation is
O(variants per chunk x their contexts), amortised over what it forgets; O(log variants) more where victims are ordered
by reuse frequency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.index_counters import IndexCounters
from chunk_cache.index.index_quota import IndexQuota
from chunk_cache.index.lookup import NOTHING, Lookup, Resolve, best_of
from chunk_cache.index.need import Need
from chunk_cache.index.observer import Observer
from chunk_cache.index.peers import behind, find_same, is_superseded
from chunk_cache.index.variant import (
    Home,
    PathHome,
    PathTokens,
    Rank,
    Variant,
    check_home,
    holder_of,
    path_start_of,
    rank_of,
)
from chunk_cache.index.variant_table import VariantTable
from chunk_cache.index.victims import AGEING, victim_order

TOKENS_PER_LOOK = 128
"""A sweep looks at one more variant for so many evicted tokens; a chunk usually has more tokens."""


class ChunkIndex:
    """Variants by chunk key, bounded.

    Args:
        max_variants: of all chunks together: Cache-Craft's N x M instances.
        max_variants_per_chunk: of one chunk. Above it, no variant evicts one of a better rank (`Rank`).
        max_path_tokens: tokens of remembered paths (8 bytes each); the least recently used path goes first.
        eviction: the eviction order, one of `victims.EVICTIONS`.
        ageing: by how much the age grows when the store has evicted as many tokens as it holds (a turnover).
        partition_share: of variants and path tokens that one partition may have.
    """

    def __init__(
        self,
        max_variants: int,
        max_variants_per_chunk: int,
        max_path_tokens: int,
        eviction: str = "lru",
        ageing: float = AGEING,
        partition_share: float = 1.0,
    ) -> None:
        assert min(max_variants, max_variants_per_chunk, max_path_tokens) >= 1, "every bound must be at least 1"
        self.max_variants = max_variants
        self.max_variants_per_chunk = max_variants_per_chunk
        self.max_path_tokens = max_path_tokens
        self.counters = IndexCounters()
        self.quota = IndexQuota(max_variants, max_path_tokens, partition_share, lambda: victim_order(eviction, ageing))
        self._table = VariantTable(victim_order(eviction, ageing), self.quota)
        self._ageing = ageing
        self._next_id = 0
        self.version = 0
        """Changes whenever a lookup may find something better or worse; a mere use does not change it."""
        self.observer: Observer | None = None
        """Told which variants come and go; sizes are tokens."""

    def __len__(self) -> int:
        return len(self._table.order)

    def __iter__(self) -> Iterator[Variant]:
        """All variants, in eviction order."""
        return iter(self._table.order)

    def victims(self, above: Sequence[bytes]) -> Iterator[Variant]:
        """All variants in eviction order, those of the partitions `above` before all others."""
        for owner in above:
            yield from self.quota.order_of(owner)
        for variant in self:
            if not above or variant.holder.partition.key not in above:
                yield variant

    @property
    def num_chunks(self) -> int:
        return len(self._table.by_key)

    @property
    def num_paths(self) -> int:
        return len(self._table.paths)

    @property
    def num_path_tokens(self) -> int:
        return self._table.paths.total_tokens

    @property
    def num_derived_tokens(self) -> int:
        """Tokens of derived variants; prepared ones do not count."""
        return self._table.num_derived_tokens

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of variants that were used; tokens that two of them share count twice."""
        return self._table.num_reused_tokens

    def get(self, variant_id: int) -> Variant | None:
        return self._table.order.get(variant_id)

    def has(self, key: bytes) -> bool:
        """Whether a variant of a chunk is remembered; does not check that it is still stored."""
        return key in self._table.by_key

    def variants_of(self, key: bytes) -> list[Variant]:
        """The variants of one chunk, in the order in which they were stored; counts no lookup and forgets nothing."""
        return list(self._table.by_key.get(key, ()))

    def prepared(self, key: bytes, system: bytes, context: tuple[bytes, ...]) -> Variant | None:
        """The prepared variant of a chunk that was computed behind this system prompt and context."""
        peers = self._table.by_key.get(key, ())
        return next((peer for peer in peers if peer.is_prepared and behind(peer) == (system, context)), None)

    def wants(
        self,
        key: bytes,
        *,
        start: int,
        generation: int,
        context: tuple[bytes, ...],
        system: bytes = b"",
        is_prepared: bool = False,
    ) -> bool:
        """Whether `add` would take a home for this KV; ask before inserting a node."""
        peers = self._table.by_key.get(key, ())
        if is_prepared and any(peer.is_prepared and peer.system == system for peer in peers):
            return True  # it replaces that one
        place, is_derived = (system, context), generation and not is_prepared
        if is_derived and any(peer.is_exact and not peer.is_prepared and behind(peer) == place for peer in peers):
            return False
        same = find_same(peers, start, place, is_prepared)
        if same is not None:
            return same.generation >= generation
        worst = self.worst_rank(key)
        return worst is None or rank_of(generation, is_prepared) <= worst

    def worst_rank(self, key: bytes) -> Rank | None:
        """The worst rank that one more variant of a chunk may have; None = any, there is room."""
        peers = self._table.by_key.get(key, ())
        return None if len(peers) < self.max_variants_per_chunk else max(peer.rank for peer in peers)

    def add(
        self,
        key: bytes,
        *,
        length: int,
        start: int,
        generation: int,
        context: tuple[bytes, ...],
        home: Home,
        system: bytes = b"",
        statistics: ChunkStatistics | None = None,
        prompt_keys: tuple[bytes, ...] | None = None,
        is_prepared: bool = False,
    ) -> Variant | None:
        """Remembers a variant.

        KV of the same system prompt, context and start is represented once. If it is there already, its variant moves
        to the new home, which was stored a moment ago while the old one may be gone; of two generations the lower one
        stays. A derived variant is refused if an exact one of the same context exists, and is removed when one arrives.
        A prepared variant stands beside these, one per system prompt: a new one replaces it.

        Args:
            context: keys of the pieces (`ChunkPrompt`) in front of it, in order.
            system: marks of the system prompt in front of these.
            is_prepared: it was computed ahead of time, for any prompt.
            prompt_keys: keys of all pieces of the prompt, which begin with `context`; all variants of the prompt share
                this tuple, so that none needs a context of its own.

        Returns:
            The variant that now lives in `home`, or None if `home` was refused: a better variant of this KV exists, the
            chunk has as many variants as it may and all are better, or the path alone exceeds its bound.
        """
        check_home(home, length, start, generation)
        fits = not isinstance(home, PathHome) or self.takes_path(len(home.path))
        if not fits or not self.wants(
            key, start=start, generation=generation, context=context, system=system, is_prepared=is_prepared
        ):
            self.counters.num_refused += 1
            return None
        peers, place = self._table.by_key.get(key, ()), (system, context)
        same = find_same(peers, start, place, is_prepared)
        if same is not None and same.generation == generation:
            self.move(same, home)
            self._table.refresh(same)
            if statistics is not None:
                self.describe(same.variant_id, statistics)
            self.version += 1
            self.counters.num_refreshed += 1
            return same
        for peer in [p for p in peers if is_superseded(p, generation, place, is_prepared, p is same)]:
            self._remove(peer)
            self.counters.num_superseded += 1
        self._make_room(key, rank_of(generation, is_prepared), home)
        prompt_keys = context if prompt_keys is None else prompt_keys
        assert prompt_keys[: len(context)] == context, "the prompt does not begin with the context"
        variant = Variant(
            self._next_id,
            key,
            peers[0].length if peers else length,  # a number object that the peers share
            start,
            generation,
            prompt_keys,
            len(context),
            holder_of(home),
            path_start_of(home),
            statistics=statistics,
            is_prepared=is_prepared,
            system=system,
        )
        self._next_id += 1
        self._table.insert(variant)
        self.version += 1
        self.counters.num_added += 1
        if self.observer is not None:
            self.observer.stored(variant.key, variant.name, variant.holder.partition.key, variant.length)
        return variant

    def stored_len(self, key: bytes, resolve: Resolve, need: Need) -> int:
        """The most leading tokens of a chunk that a fitting variant has; counts no lookup and forgets nothing."""
        return max((resolve(peer) for peer in self._table.by_key.get(key, ()) if need.fits(peer)), default=0)

    def lookup(self, key: bytes, resolve: Resolve, need: Need | None = None) -> Lookup:
        """Finds the best variant of a chunk: fewest tokens to compute, then lowest generation, then most recent use.

        If c of its n tokens are stored, a variant leaves n - c + CFO x c tokens to compute (CFO at alpha 1). If one
        variant is prepared, other derived ones are passed over.

        Forgets variants that `resolve` finds gone. Counts no use: call `touch` when the variant is used.

        Args:
            need: variants with an obstacle are passed over, those that cost too much are not: the plan decides about
                these. None = none are passed over, and CFO is ignored.
        """
        self.counters.num_lookups += 1
        found = self.best(key, resolve, need)
        if found.variant is not None:
            if found.covered_len == found.variant.length:
                self.counters.num_full += 1
            else:
                self.counters.num_partial += 1
        return found

    def best(self, key: bytes, resolve: Resolve, need: Need | None = None) -> Lookup:
        """Like `lookup`, but counts nothing."""
        peers = self._table.by_key.get(key)
        return NOTHING[self.why_gone(key)] if peers is None else best_of(peers, resolve, need, self._forget_gone)

    def why_gone(self, key: bytes) -> str:
        """Why no variant of a chunk is remembered, a reason of `chunk_cache.types`."""
        return self._table.gone_keys.get(key, "not_stored")

    def sweep(self, resolve: Resolve, num_evicted: int) -> int:
        """Forgets some variants that the store has evicted, and returns how many; call it after evictions.

        It looks at variants in turn, as many as `num_evicted` tokens ask for. That keeps the share of those that are
        gone small, at a cost that does not depend on the size of the index.
        """
        num_gone = 0
        for variant in self._table.gone(resolve, 1 + num_evicted // TOKENS_PER_LOOK):
            self._forget_gone(variant)
            num_gone += 1
        return num_gone

    def touch(self, variant: Variant, weight: float = 1.0) -> bool:
        """Count a use; False when the variant has left the index meanwhile.

        Args:
            weight: what the use adds to the reuse frequency f_r (`reusability.use_weight`).
        """
        if self.get(variant.variant_id) is not variant:
            return False
        self._table.use(variant, weight)
        return True

    @property
    def age(self) -> float:
        """Worth of a new variant; 0 with eviction lru."""
        return self._table.order.age

    def advance_age(self, turnovers: float) -> None:
        """Notes that the store has evicted `turnovers` times what it holds; later uses are worth more."""
        self._table.order.advance_age(self._ageing * turnovers)

    def worth(self, variant: Variant) -> float:
        """Aged reuse frequency of a variant of this index; 0 with eviction lru."""
        return self._table.order.worth(variant)

    def popular_len(self, path: PathTokens, min_uses: int) -> int:
        """Tokens of the variants in a path that were used at least `min_uses` times."""
        return sum(v.length for v in self._table.living_in(path) if v.num_uses >= min_uses)

    def move(self, variant: Variant, home: Home) -> None:
        """The KV of a variant of this index lies in `home` from now on."""
        assert self.get(variant.variant_id) is variant, f"{variant} is not in the index"
        check_home(home, variant.length, variant.start, variant.generation)
        holder = holder_of(home)
        if holder is variant.holder:
            return
        assert holder.partition == variant.holder.partition, f"{variant} moves to another partition"
        self.version += 1
        self._table.move(variant, holder, path_start_of(home))
        # last: by now the new path is the most recently used one and fits, so it is never the one that goes
        self._shrink_paths(0, holder.partition.key)

    def describe(self, variant_id: int, statistics: ChunkStatistics) -> Variant | None:
        """Adds the statistics of a variant that was computed, or computed anew; None if it is not there any more."""
        variant = self.get(variant_id)
        if variant is not None:
            variant.statistics = statistics.filled_from(variant.statistics)
            self.version += 1
        return variant

    def discard(self, variant_id: int) -> bool:
        """Forget one variant; False when it is not there."""
        variant = self.get(variant_id)
        if variant is None:
            return False
        self._remove(variant)
        self.counters.num_discarded += 1
        return True

    def clear(self, why: str | None = None) -> None:
        """Forget everything; counters, clock and ids go on.

        Args:
            why: the reason that lookups of these chunks give from now on; None = they never were stored.
        """
        self.version += 1
        self.counters.num_discarded += len(self)
        self._table.clear(why)
        if self.observer is not None:
            self.observer.cleared()

    def stats(self) -> dict[str, int]:
        """Sizes and counters, for metrics and logs."""
        sizes = {
            "num_variants": len(self),
            "num_exact": len(self) - self._table.num_derived,
            "num_derived": self._table.num_derived,
            "num_chunks": self.num_chunks,
            "num_paths": self.num_paths,
            "num_path_tokens": self.num_path_tokens,
            "num_partitions": len(self.quota.variants),
        }
        return sizes | asdict(self.counters)

    def check_integrity(self, resolve: Resolve | None = None) -> None:
        """Recompute every derived structure from scratch and compare.

        Args:
            resolve: when given, every variant is resolved too.

        Raises:
            AssertionError: something does not agree; the message says what.
        """
        assert len(self) <= self.max_variants, f"{len(self)} variants, the bound is {self.max_variants}"
        assert self.num_path_tokens <= self.max_path_tokens, f"{self.num_path_tokens} path tokens are over the bound"
        self._table.check_integrity(self.max_variants_per_chunk)
        for v in self:
            covered_len = resolve(v) if resolve else 0
            assert 0 <= covered_len <= v.length, f"{covered_len} tokens stored of {v}"

    def takes_path(self, length: int) -> bool:
        """Whether a path of `length` tokens is within the bounds by itself."""
        return length <= min(self.max_path_tokens, self.quota.path_tokens.most)

    def _make_room(self, key: bytes, rank: Rank, home: Home) -> None:
        owner = holder_of(home).partition.key
        peers = self._table.by_key.get(key, [])
        if len(peers) >= self.max_variants_per_chunk:
            not_better = (peer for peer in peers if peer.rank >= rank)
            self._remove(min(not_better, key=self._table.order.order), is_victim=True)
            self.counters.num_dropped_per_chunk += 1
        if isinstance(home, PathHome) and home.path not in self._table.paths:
            self._shrink_paths(len(home.path), owner)
        while self.quota.variants.excess(owner, 1) > 0:
            self._remove_for_share(self.quota.first(owner))
        while len(self) >= self.max_variants:
            self._remove(self._table.order.first(), is_victim=True)
            self.counters.num_dropped_variants += 1

    def _shrink_paths(self, num_new_tokens: int, owner: bytes) -> None:
        table = self._table
        while self.quota.path_tokens.excess(owner, num_new_tokens) > 0:
            for variant in table.living_in(self.quota.oldest_path(owner)):
                self._remove_for_share(variant)
        while table.paths.total_tokens + num_new_tokens > self.max_path_tokens:
            self.counters.num_dropped_paths += 1
            for variant in table.living_in(table.paths.oldest()):
                self._remove(variant)

    def _remove(self, variant: Variant, *, is_victim: bool = False) -> None:
        self.version += 1
        self._table.remove(variant, is_victim=is_victim)
        if self.observer is not None:
            self.observer.removed(variant.key, variant.name)

    def _forget_gone(self, variant: Variant) -> None:
        """Removes a variant that the store has evicted."""
        self._remove(variant)
        self.counters.num_gone += 1
        self._table.note_gone(variant.key, "evicted")

    def _remove_for_share(self, variant: Variant) -> None:
        """Removes a variant because its partition has its share; this does not age the variants of others."""
        self._remove(variant)
        self.counters.num_dropped_share += 1
        self._table.note_gone(variant.key, "partition_share")
