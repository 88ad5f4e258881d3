"""The chunk index: which variants of which chunks exist, and where.

    add           remember a variant; the same KV is never remembered twice
    lookup        the best variant of a chunk that is still stored; forgets those that are gone
    touch         a variant was used
    move          a variant got another home
    describe      the statistics of a variant have come
    sweep         forget some of what is gone, so that what the store has evicted takes no place here
    discard, clear   forget

The index stores no KV and protects nothing from eviction: the radix tree does both. It has bounds of its own (variants,
variants per chunk, remembered path tokens) and its own order (`victims`), by a logical clock. No wall clock
and no set order, so equal calls give equal results on every rank. Every operation is O(variants per chunk x their
contexts), amortised over what it forgets; O(log variants) more where victims are ordered by reuse frequency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.index_counters import IndexCounters
from chunk_cache.index.index_quota import IndexQuota
from chunk_cache.index.need import OBSTACLES, Need, system_charge
from chunk_cache.index.observer import Observer
from chunk_cache.index.paths import PathLedger
from chunk_cache.index.peers import behind, beside_prepared, check_peers, find_same, is_superseded, ranked
from chunk_cache.index.variant import Home, NodeHome, PathHome, PathTokens, Rank, Variant, holder_of, rank_of
from chunk_cache.index.victims import AGEING, victim_order
from chunk_cache.keys import partition_key
from chunk_cache.types import REASONS

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
    unit_cfo: float | None = None
    """`unit_cfo_of` the variant behind the new context, in [0, 2]; None where it was not asked for."""
    other_system: float | None = None
    """The share of it that another system prompt costs; None where that is the same, or CFO was not asked for."""

    @property
    def share_to_compute(self) -> float:
        """Tokens that are not stored, and `unit_cfo` of the others, as a share of the chunk; 1 without a variant."""
        if self.variant is None:
            return 1.0
        return 1.0 - (1.0 - (self.unit_cfo or 0.0)) * self.covered_len / self.variant.length

    def __post_init__(self) -> None:
        assert (self.variant is None) == (self.covered_len == 0), f"{self.covered_len} tokens of {self.variant}"
        assert (self.variant is None) == (self.reason is not None), f"variant {self.variant}, reason {self.reason}"
        assert self.reason is None or self.reason in REASONS, f"unknown reason {self.reason!r}"


TOKENS_PER_LOOK = 128
"""Evicted tokens for which a sweep looks at one variant more; a chunk usually has more tokens."""

MAX_GONE_KEYS = 4096
"""Chunks that are remembered as evicted, the newest; only for the reason that a lookup gives."""

_NOT_STORED = Lookup(None, 0, "not_stored")
_EVICTED = Lookup(None, 0, "evicted")
_PARTITION_SHARE = Lookup(None, 0, "partition_share")
_PASSED_OVER = {reason: Lookup(None, 0, reason) for reason in OBSTACLES}


class ChunkIndex:
    """Variants by chunk key, bounded.

    Args:
        max_variants: of all chunks together: Cache-Craft's N x M instances.
        max_variants_per_chunk: of one chunk. A variant never takes the place of one of lower generation.
        max_path_tokens: tokens of remembered paths (8 bytes each); the least recently used path goes first.
        eviction: which variant goes first, one of `victims.EVICTIONS`.
        ageing: by how much the age grows when the store has been turned over once.
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
        self._by_key: dict[bytes, list[Variant]] = {}
        self._order = victim_order(eviction, ageing)
        self.quota = IndexQuota(max_variants, max_path_tokens, partition_share, lambda: victim_order(eviction, ageing))
        self._ageing = ageing
        self._num_derived = 0
        self.num_derived_tokens = 0
        """Tokens of variants that came from approximate ones; prepared variants do not count."""
        self.num_reused_tokens = 0
        """Tokens of variants that were used; tokens that two of them share count twice."""
        self._paths = PathLedger()
        self._turns: deque[int] = deque()  # every variant once, and some that are gone
        self._gone_keys: dict[bytes, Lookup] = {}  # with what is said of them
        self._next_id = 0
        self._clock = 0
        self.version = 0
        """Changes whenever a lookup may find something better or worse; by a use it only finds another as good."""
        self.observer: Observer | None = None
        """Told what comes and goes; sizes are tokens."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Variant]:
        """All variants, in the order in which they go."""
        return iter(self._order)

    def victims(self, above: Sequence[bytes]) -> Iterator[Variant]:
        """All variants in the order in which they go, those of the partitions `above` before all others."""
        for owner in above:
            yield from self.quota.order_of(owner)
        for variant in self:
            if not above or partition_key(variant.holder.partition) not in above:
                yield variant

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
        return self._order.get(variant_id)

    def has(self, key: bytes) -> bool:
        """Whether a variant of a chunk is remembered; that it is still in the store is not looked at."""
        return key in self._by_key

    def variants_of(self, key: bytes) -> list[Variant]:
        """The variants of one chunk, in the order in which they were stored; counts no lookup and forgets nothing."""
        return list(self._by_key.get(key, ()))

    def prepared(self, key: bytes, system: bytes, context: tuple[bytes, ...]) -> Variant | None:
        """The prepared variant of a chunk, where it was computed behind these."""
        peers = self._by_key.get(key, ())
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
        """Whether `add` would take a home for this KV, so that nobody inserts a node the index then refuses."""
        peers = self._by_key.get(key, ())
        if is_prepared and any(peer.is_prepared and peer.system == system for peer in peers):
            return True  # in the place of that one
        place = system, context
        if (
            generation
            and not is_prepared
            and any(peer.is_exact and not peer.is_prepared and behind(peer) == place for peer in peers)
        ):
            return False
        same = find_same(peers, start, place, is_prepared)
        if same is not None:
            return same.generation >= generation
        worst = self.worst_rank(key)
        return worst is None or rank_of(generation, is_prepared) <= worst

    def worst_rank(self, key: bytes) -> Rank | None:
        """Where a chunk has as many variants as it may have: one that arrives is refused above this; None = there is
        room.
        """
        peers = self._by_key.get(key, ())
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
        """Remember a variant.

        A KV of the same system prompt, context and start is represented once: it is refreshed and moves to the new
        home, which was stored a moment ago while the old one may be gone. Of different generations the lower one
        stays. A derived variant is refused where an exact one of the same context exists, and goes when one arrives. A
        prepared one stands beside these, one per system prompt: it goes when another arrives.

        Args:
            context: keys of the chunks in front of it, in order.
            system: marks of the system prompt in front of these.
            is_prepared: it was computed ahead of time, for any prompt.
            prompt_keys: keys of all chunks of the prompt, which begin with `context`; given to each variant of the
                prompt, it saves each a context of its own.

        Returns:
            The variant that now lives in `home`, or None when `home` was not taken: a better variant stands for this
            KV, the chunk's bound holds only better ones, or the path alone exceeds its bound.
        """
        _check_new(length, start, generation, home)
        if not self._fits(home) or not self.wants(
            key, start=start, generation=generation, context=context, system=system, is_prepared=is_prepared
        ):
            self.counters.num_refused += 1
            return None
        peers, place = self._by_key.get(key, ()), (system, context)
        same = find_same(peers, start, place, is_prepared)
        if same is not None and same.generation == generation:
            self._move(same, home)
            self._refresh(same)
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
            statistics=statistics,
            is_prepared=is_prepared,
            system=system,
        )
        self._next_id += 1
        self._insert(variant)
        self.counters.num_added += 1
        return variant

    def stored_len(self, key: bytes, resolve: Resolve, need: Need) -> int:
        """The most leading tokens of a chunk that a fitting variant has; counts no lookup and forgets nothing."""
        return max((resolve(peer) for peer in self._by_key.get(key, ()) if need.fits(peer)), default=0)

    def lookup(self, key: bytes, resolve: Resolve, need: Need | None = None) -> Lookup:
        """The best variant of a chunk: fewest tokens to compute, then lowest generation, most recently used.

        Of a variant of n tokens, c of them stored, these are n - c and CFO x c (at alpha 1) of the others. Beside a
        prepared variant other derived ones are passed over.

        Variants that `resolve` finds gone are forgotten. The use is not counted: call `touch` when it is used.

        Args:
            need: variants with an obstacle are passed over; whether the best costs too much is the plan's to say.
                None = none are, and CFO is not looked at.
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
        """The variant that `lookup` would find; nothing is counted."""
        peers = self._by_key.get(key)
        if peers is None:
            return self._gone_keys.get(key, _NOT_STORED)
        allowed, obstacle = (list(peers), None) if need is None else need.sort_out(peers)
        for prepared in [p for p in allowed if p.is_prepared and resolve(p) == 0]:
            self._forget_gone(prepared)
            allowed.remove(prepared)
        allowed.sort(key=lambda variant: -variant.last_use)
        best: Variant | None = None
        best_len, best_cfo, best_share = 0, None, 1.0
        for cfo, variant in ranked(beside_prepared(allowed), need):
            if best is not None and best_share <= (cfo or 0.0):
                break  # even if stored in full, it and all behind it are no better
            covered_len = resolve(variant)
            assert 0 <= covered_len <= variant.length, f"{covered_len} tokens stored of {variant}"
            if covered_len == 0:
                self._forget_gone(variant)
                continue
            share = 1.0 - (1.0 - (cfo or 0.0)) * covered_len / variant.length
            if best is None or share < best_share:
                best, best_len, best_cfo, best_share = variant, covered_len, cfo, share
        if best is None:
            return self._gone_keys.get(key, _EVICTED) if obstacle is None else _PASSED_OVER[obstacle]
        charge = None if need is None or best.system == need.system else system_charge(best, need.system)
        return Lookup(best, best_len, None, best_cfo, charge)

    def why_gone(self, key: bytes) -> str:
        """Why no variant of a chunk is remembered, a reason of `chunk_cache.types`."""
        return str(self._gone_keys.get(key, _NOT_STORED).reason)

    def sweep(self, resolve: Resolve, num_evicted: int) -> int:
        """Forgets variants that the store has evicted, after it has evicted so many tokens; how many these were.

        It looks at some variants, each in its turn, in proportion to what was evicted. That keeps the share of those
        that are gone small at a cost that does not depend on how many there are.
        """
        num_gone = 0
        for _ in range(min(1 + num_evicted // TOKENS_PER_LOOK, len(self._turns))):
            if not self._turns:
                break  # what is forgotten may take turns that are nobody's with it
            variant = self.get(self._turns.popleft())
            if variant is None:
                continue
            if resolve(variant):
                self._turns.append(variant.variant_id)
            else:
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
        if not variant.num_uses:
            self.num_reused_tokens += variant.length
        variant.num_uses += 1
        variant.reuse_frequency += weight
        self._refresh(variant)
        return True

    @property
    def age(self) -> float:
        """What a newcomer is worth; 0 with eviction lru."""
        return self._order.age

    def advance_age(self, turnovers: float) -> None:
        """The store has evicted `turnovers` times what it holds; what was not used meanwhile is worth less for it."""
        self._order.advance_age(self._ageing * turnovers)

    def worth(self, variant: Variant) -> float:
        """Reuse frequency of a variant of this index, aged; 0 with eviction lru."""
        return self._order.worth(variant)

    def popular_len(self, path: PathTokens, min_uses: int) -> int:
        """Tokens of the variants in a path that were used so often."""
        holders = [self.get(variant_id) for variant_id in self._paths.holders(path)]
        return sum(v.length for v in holders if v is not None and v.num_uses >= min_uses)

    def move(self, variant: Variant, home: Home) -> None:
        """The KV of a variant of this index lies in `home` from now on."""
        assert self.get(variant.variant_id) is variant, f"{variant} is not in the index"
        _check_new(variant.length, variant.start, variant.generation, home)
        self._move(variant, home)

    def describe(self, variant_id: int, statistics: ChunkStatistics) -> Variant | None:
        """What was taken when a variant was computed, or computed anew; None when it is not there any more."""
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
        keys = [] if why is None else list(self._by_key)
        self.version += 1
        self.counters.num_discarded += len(self)
        for variant in self:
            if isinstance(variant.holder, NodeHome):
                variant.holder.variant_id = -1
        self._by_key.clear()
        self._order.clear()
        self._num_derived = 0
        self.num_derived_tokens = 0
        self.num_reused_tokens = 0
        self._paths.clear()
        self.quota.clear()
        self._turns.clear()
        self._gone_keys.clear()
        for key in keys:
            self._note_gone(key, Lookup(None, 0, why))
        if self.observer is not None:
            self.observer.cleared()

    def stats(self) -> dict[str, int]:
        """Sizes and counters, for metrics and logs."""
        sizes = {
            "num_variants": len(self),
            "num_exact": len(self) - self._num_derived,
            "num_derived": self._num_derived,
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
        variants = list(self)
        assert len({v.variant_id for v in variants}) == len(variants), "a variant is listed twice"
        assert len(variants) <= self.max_variants, f"{len(variants)} variants, the bound is {self.max_variants}"
        assert self.num_path_tokens <= self.max_path_tokens, f"{self.num_path_tokens} path tokens are over the bound"
        self._order.check_integrity(self._clock)
        self.quota.check_integrity(variants, self._clock)
        num_derived = sum(not v.is_exact for v in variants)
        assert self._num_derived == num_derived, f"num_derived is {self._num_derived}, there are {num_derived}"
        derived = sum(map(_derived_len, variants))
        assert self.num_derived_tokens == derived, (
            f"num_derived_tokens is {self.num_derived_tokens}, there are {derived}"
        )
        reused = sum(v.length for v in variants if v.num_uses)
        assert self.num_reused_tokens == reused, f"num_reused_tokens is {self.num_reused_tokens}, there are {reused}"
        check_peers(self._by_key, variants, self.max_variants_per_chunk)
        turns = sorted(variant_id for variant_id in self._turns if self.get(variant_id) is not None)
        assert turns == sorted(v.variant_id for v in variants), f"turns {turns} are not those of the variants"
        assert len(self._turns) <= 2 * len(variants) + 64, f"{len(self._turns)} turns of {len(variants)} variants"
        assert self._by_key.keys().isdisjoint(self._gone_keys), "a chunk is stored and gone"
        paths: dict[PathTokens, set[int]] = {}
        nodes: set[NodeHome] = set()
        for v in variants:
            _check_new(v.length, v.start, v.generation, v.home)
            if isinstance(v.holder, PathTokens):
                paths.setdefault(v.holder, set()).add(v.variant_id)
            else:
                assert v.holder not in nodes, f"{v.holder} is the home of two variants"
                assert v.holder.variant_id == v.variant_id, f"{v.holder} belongs to {v.holder.variant_id}, not to {v}"
                nodes.add(v.holder)
            covered_len = resolve(v) if resolve else 0
            assert 0 <= covered_len <= v.length, f"{covered_len} tokens stored of {v}"
        self._paths.check_integrity(paths)

    def _fits(self, home: Home) -> bool:
        return not isinstance(home, PathHome) or self.takes_path(len(home.path))

    def takes_path(self, length: int) -> bool:
        """Whether a path of so many tokens fits, alone."""
        return length <= min(self.max_path_tokens, self.quota.path_tokens.most)

    def _refresh(self, variant: Variant) -> None:
        self._clock += 1
        variant.last_use = self._clock
        self._order.touch(variant)
        self.quota.touch(variant, self._order.age)
        if isinstance(variant.holder, PathTokens):
            self._paths.touch(variant.holder)

    def _move(self, variant: Variant, home: Home) -> None:
        if holder_of(home) is variant.holder:
            return
        assert holder_of(home).partition == variant.holder.partition, f"{variant} moves to another partition"
        self.version += 1
        self._leave_home(variant)
        variant.holder = holder_of(home)
        self._enter_home(variant)
        # after entering: the new path is then the most recently used and fits, so it is never the one that goes
        self._shrink_paths(0, partition_key(holder_of(home).partition))

    def _make_room(self, key: bytes, rank: Rank, home: Home) -> None:
        owner = partition_key(holder_of(home).partition)
        peers = self._by_key.get(key, [])
        if len(peers) >= self.max_variants_per_chunk:
            not_better = (peer for peer in peers if peer.rank >= rank)
            self._remove(min(not_better, key=self._order.order), is_victim=True)
            self.counters.num_dropped_per_chunk += 1
        if isinstance(home, PathHome) and home.path not in self._paths:
            self._shrink_paths(len(home.path), owner)
        while self.quota.variants.excess(owner, 1) > 0:
            self._remove_for_share(self.quota.first(owner))
        while len(self) >= self.max_variants:
            self._remove(self._order.first(), is_victim=True)
            self.counters.num_dropped_variants += 1

    def _shrink_paths(self, num_new_tokens: int, owner: bytes) -> None:
        while self.quota.path_tokens.excess(owner, num_new_tokens) > 0:
            for variant_id in self.quota.oldest_path(owner):
                variant = self.get(variant_id)
                assert variant is not None, f"a path is held by variant {variant_id}, which is not in the index"
                self._remove_for_share(variant)
        while self._paths.total_tokens + num_new_tokens > self.max_path_tokens:
            self.counters.num_dropped_paths += 1
            for variant_id in self._paths.holders(self._paths.oldest()):
                variant = self.get(variant_id)
                assert variant is not None, f"a path is held by variant {variant_id}, which is not in the index"
                self._remove(variant)

    def _insert(self, variant: Variant) -> None:
        self.version += 1
        self._by_key.setdefault(variant.key, []).append(variant)
        self._clock += 1
        variant.last_use = self._clock
        self._order.add(variant)
        self.quota.add(variant, self._order.age)
        self._num_derived += not variant.is_exact
        self.num_derived_tokens += _derived_len(variant)
        self._enter_home(variant)
        self._gone_keys.pop(variant.key, None)
        self._turns.append(variant.variant_id)
        if self.observer is not None:
            self.observer.stored(variant.key, variant.name, partition_key(variant.holder.partition), variant.length)

    def _remove(self, variant: Variant, *, is_victim: bool = False) -> None:
        self.version += 1
        peers = self._by_key[variant.key]
        peers.remove(variant)
        if not peers:
            del self._by_key[variant.key]
        (self._order.forget if is_victim else self._order.remove)(variant)
        self._num_derived -= not variant.is_exact
        self.num_derived_tokens -= _derived_len(variant)
        self.num_reused_tokens -= variant.length if variant.num_uses else 0
        self._leave_home(variant)
        self.quota.remove(variant)
        if len(self._turns) > 2 * len(self) + 64:
            self._turns = deque(variant_id for variant_id in self._turns if self.get(variant_id) is not None)
        if self.observer is not None:
            self.observer.removed(variant.key, variant.name)

    def _forget_gone(self, variant: Variant) -> None:
        """The store has evicted it."""
        self._remove(variant)
        self.counters.num_gone += 1
        self._note_gone(variant.key, _EVICTED)

    def _remove_for_share(self, variant: Variant) -> None:
        """Its partition has its share; nobody else's variants age by it."""
        self._remove(variant)
        self.counters.num_dropped_share += 1
        self._note_gone(variant.key, _PARTITION_SHARE)

    def _note_gone(self, key: bytes, why: Lookup) -> None:
        if key not in self._by_key:
            self._gone_keys[key] = why
            if len(self._gone_keys) > MAX_GONE_KEYS:
                del self._gone_keys[next(iter(self._gone_keys))]

    def _enter_home(self, variant: Variant) -> None:
        holder = variant.holder
        if isinstance(holder, PathTokens):
            before = self._paths.total_tokens
            self._paths.hold(holder, variant.variant_id)
            self.quota.hold(holder, variant.variant_id, self._paths.total_tokens - before)
        else:
            assert holder.variant_id < 0, f"{holder} is already the home of another variant"
            holder.variant_id = variant.variant_id

    def _leave_home(self, variant: Variant) -> None:
        if isinstance(variant.holder, PathTokens):
            before = self._paths.total_tokens
            self._paths.release(variant.holder, variant.variant_id)
            self.quota.release(variant.holder, variant.variant_id, before - self._paths.total_tokens)
        else:
            variant.holder.variant_id = -1


def _derived_len(variant: Variant) -> int:
    return 0 if variant.is_exact or variant.is_prepared else variant.length


def _check_new(length: int, start: int, generation: int, home: Home) -> None:
    assert length > 0, f"a chunk of {length} tokens"
    assert min(start, generation) >= 0, f"start {start}, generation {generation}"
    if isinstance(home, PathHome):
        assert generation == 0, f"a path holds exact KV only, not generation {generation}"
        assert home.start == start, f"at {home.start} in its path, but computed at {start}"
        assert start + length <= len(home.path), f"[{start}, {start + length}) is outside {home.path}"
    else:
        assert len(home.node_key) >= length, f"{home} is shorter than the chunk's {length} tokens"
