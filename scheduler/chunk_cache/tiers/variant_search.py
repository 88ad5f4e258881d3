"""VariantSearch: which stored variant of a chunk a prompt is given, over the KV pool and all tiers below it.

    next      what to do now: `Ask` a tier what it has, `Read` a variant from it; None = the search is over
    told      what a tier has, once it was asked
    failed    a variant could not be read
    expected  what will probably be read, and how much of the chunk need not be computed then

The order is that of the pool (`index.peers`); loading from a tier adds a cost, as a share of the time to compute the
chunk. A tier is asked if it may have a better variant than those known. What a `TierLedger` knows of an entry
(`Traits`) gives a lower bound of its CFO; only the tier itself knows all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from chunk_cache.index.need import PREPARED_CFO, Described, Need
from chunk_cache.index.peers import Order, beside_prepared, order_of
from chunk_cache.index.variant import Rank, rank_of
from chunk_cache.tiers.tier_ledger import PLAIN, Traits


class OfferedVariant(Described, Protocol):
    """A variant that a tier has."""

    @property
    def name(self) -> str: ...


V = TypeVar("V", bound=OfferedVariant)


@dataclass(frozen=True, slots=True)
class Held:
    """The variant of a chunk that the pool would give."""

    share: float
    """`Lookup.share_to_compute`; infinite where the pool has none that fits."""
    generation: int
    has_prepared: bool
    """Whether the pool has a prepared variant that may be used; beside it other derived ones are passed over."""
    names: frozenset[str]
    """`variant_name` of all variants of the chunk that the pool has; none of them is loaded."""
    worst_rank: Rank | None
    """The pool takes no variant of a larger rank; None = it takes any."""

    @property
    def is_of_use(self) -> bool:
        return self.share < math.inf

    @property
    def order(self) -> Order:
        return order_of(self.share, self.generation)


NOTHING_HELD = Held(math.inf, 0, has_prepared=False, names=frozenset(), worst_rank=None)


@dataclass(frozen=True, slots=True)
class TierView:
    """What is known of a tier before it is asked for a chunk.

    Attributes:
        entries: variants of the chunk that its ledger has, by name.
        load_share: what loading one takes, as a share of what computing the chunk takes.
    """

    tier: str
    entries: Mapping[str, Traits]
    load_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """The tier to ask for its variants of the chunk."""

    tier: str


@dataclass(frozen=True, slots=True)
class Read(Generic[V]):
    """The variant that is to be read from a tier."""

    tier: str
    variant: V


@dataclass(frozen=True, slots=True)
class Expected:
    """The tier that a variant will probably be read from, and the share of the chunk that this spares."""

    tier: str
    share: float

    def num_rows(self, num_tokens: int) -> int:
        """Rows that it spares of a chunk of `num_tokens` tokens."""
        return max(1, round(self.share * num_tokens))


Found: TypeAlias = tuple[str, V]


def rank(
    found: Sequence[Found[V]],
    need: Need,
    load_shares: Mapping[str, float],
    held: Held = NOTHING_HELD,
) -> list[Found[V]]:
    """Variants that tiers have, the best first: those that fit and are better than what the pool has.

    Args:
        found: variants with the names of their tiers; equal ones keep their order.
        load_shares: by tier; see `TierView`.
    """
    limit = held.order
    orders = [
        (order, (tier, variant))
        for tier, variant in found
        if need.fits(variant) and _is_wanted(variant.name, variant, held, held.has_prepared)
        if (order := order_of(need.unit_cfo(variant) + load_shares[tier], variant.generation)) < limit
    ]
    allowed = {id(variant) for variant in beside_prepared([variant for _, (_, variant) in orders])}
    return [one for _, one in sorted(orders, key=lambda item: item[0]) if id(one[1]) in allowed]


def is_better(variant: Described, need: Need, held: Held) -> bool:
    """Whether a variant that is loaded already is better than what the pool has."""
    if held.has_prepared and _is_other_derived(variant):
        return False
    return order_of(need.unit_cfo(variant), variant.generation) < held.order


def least_unit_cfo(traits: Traits, need: Need) -> float:
    """A lower bound of the CFO at alpha 1 of an entry, by what a ledger knows of it."""
    if traits.is_prepared:
        return PREPARED_CFO
    return 1.0 if traits.context == PLAIN.context and need.context else 0.0


class VariantSearch(Generic[V]):
    """See the head of this file.

    Args:
        views: of the tiers that may be asked, the fastest first.
        held: what the pool has; if that is of no use, tiers are asked until one has a variant that fits, known or not.
    """

    def __init__(self, need: Need, views: Sequence[TierView], held: Held = NOTHING_HELD) -> None:
        self._need = need
        self._views = tuple(views)
        self._held = held
        self._load_shares = {view.tier: view.load_share for view in views}
        self._asked: set[str] = set()
        self._found: list[Found[V]] = []

    def next(self) -> Ask | Read[V] | None:
        """What to do now; the same until something is reported."""
        ranked = self._ranked()
        for view in self._views:
            is_open = view.tier not in self._asked
            if is_open and (not (ranked or self._held.is_of_use) or any(self._better(view, ranked))):
                return Ask(view.tier)
        return Read(*ranked[0]) if ranked else None

    def told(self, tier: str, variants: Sequence[V]) -> None:
        """What a tier has of the chunk; nothing where it could not be asked."""
        self._asked.add(tier)
        self._found += [(tier, variant) for variant in variants]

    def failed(self, read: Read[V]) -> None:
        """A variant could not be read."""
        self._found = [one for one in self._found if one[1] is not read.variant]

    @property
    def has_other(self) -> bool:
        """Whether a variant of use is known already: that of the pool, or one of a tier that was asked."""
        return self._held.is_of_use or bool(self._ranked())

    @property
    def goes_on_anyway(self) -> bool:
        """Whether to search whatever a load costs: for a better variant, or since no tier is known to have one."""
        return self.has_other or self.expected is None

    @property
    def expected(self) -> Expected | None:
        """What will probably be read; None if no tier is known to have a variant that is better than the pool's."""
        bounds = [
            (order, view.tier)
            for view in self._views
            if view.tier not in self._asked
            for order in self._better(view, ())
        ]
        bounds += [(self._order_of(found), found[0]) for found in self._ranked()[:1]]
        if not bounds:
            return None
        (cost, _), tier = min(bounds, key=lambda bound: bound[0])
        share = self._held.share - cost + self._load_shares[tier]
        return Expected(tier, max(0.0, min(1.0, share)))

    def likely(self, asked: Iterable[str]) -> Expected | None:
        """`expected`, or else that the first of the tiers `asked`, which others write to as well, has all of the chunk.

        If the pool has a variant that is of use, only known entries are expected.
        """
        first = next(iter(asked), None)
        return self.expected or (None if first is None or self._held.is_of_use else Expected(first, 1.0))

    def _ranked(self) -> list[Found[V]]:
        return rank(self._found, self._need, self._load_shares, self._held)

    def _order_of(self, found: Found[V]) -> Order:
        tier, variant = found
        return order_of(self._need.unit_cfo(variant) + self._load_shares[tier], variant.generation)

    def _better(self, view: TierView, ranked: Sequence[Found[V]]) -> Iterator[Order]:
        """Yields the best order of each entry that may be better than all that was ranked and than the pool's."""
        held, need = self._held, self._need
        best = self._order_of(ranked[0]) if ranked else held.order
        # If one variant is prepared, other derived ones are passed over, whatever it costs itself.
        has_prepared = held.has_prepared or any(variant.is_prepared for _, variant in ranked)
        best_of_prepared = held.order if ranked and _is_other_derived(ranked[0][1]) else best
        met = {variant.name: variant for _, variant in self._found}  # the same may lie in several tiers
        for name, traits in view.entries.items():
            if traits.generation > need.max_generation or not _is_wanted(name, traits, held, has_prepared):
                continue
            least = need.unit_cfo(met[name]) if name in met else least_unit_cfo(traits, need)
            order = order_of(least + view.load_share, traits.generation)
            if order < (best_of_prepared if traits.is_prepared else best) and least <= need.max_unit_cfo:
                yield order


class _Ranked(Protocol):
    @property
    def generation(self) -> int: ...
    @property
    def is_prepared(self) -> bool: ...


def _is_other_derived(variant: _Ranked) -> bool:
    return variant.generation > 0 and not variant.is_prepared


def _is_wanted(name: str, variant: _Ranked, held: Held, has_prepared: bool) -> bool:
    """Whether the pool lacks a variant and would take it, and no prepared one has it passed over."""
    if name in held.names or (has_prepared and _is_other_derived(variant)):
        return False
    return held.worst_rank is None or rank_of(variant.generation, variant.is_prepared) <= held.worst_rank
