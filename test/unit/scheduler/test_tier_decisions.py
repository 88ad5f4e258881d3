"""Decisions about tiers against slow oracles, over random seeds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest

from chunk_cache.index.need import Need
from chunk_cache.index.variant import rank_of
from chunk_cache.options.tier_config import TIERS, WRITES
from chunk_cache.tiers import placing
from chunk_cache.tiers.cost import (
    MIN_PATIENCE_S,
    LoadingController,
    LoadOption,
    PrefillRecord,
    ThroughputRecord,
    load_share,
)
from chunk_cache.tiers.placing import Known, Moment, Write, place, targets
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger, Traits, context_digest
from chunk_cache.tiers.variant_search import (
    NOTHING_HELD,
    Ask,
    Expected,
    Held,
    Read,
    TierView,
    VariantSearch,
    is_better,
    least_unit_cfo,
    rank,
)

SEEDS = range(600)
CONTEXTS = [tuple(keys) for n in range(3) for keys in itertools.permutations((b"a", b"b"), n)]


@dataclass(frozen=True, eq=False)
class One:
    """A variant in a tier."""

    name: str
    generation: int
    is_prepared: bool
    context: tuple[bytes, ...]
    system: bytes = b""
    statistics: None = None

    @property
    def traits(self) -> Traits:
        return Traits(self.generation, self.is_prepared, context_digest(self.context))


def drawn_variant(rng: random.Random, name: str) -> One:
    is_prepared = rng.random() < 0.2
    generation = rng.choice((0, 1)) if is_prepared else rng.choice((0, 0, 1, 2, 3))
    return One(name, generation, is_prepared, rng.choice(CONTEXTS), rng.choice((b"", b"s" * 8)))


@dataclass
class Case:
    need: Need
    tiers: dict[str, list[One]]
    load_shares: dict[str, float]
    held: Held

    @classmethod
    def drawn(cls, seed: int) -> Case:
        rng = random.Random(seed)
        need = Need(
            rng.choice((0, 1, 3)),
            context=rng.choice(CONTEXTS),
            system=rng.choice((b"", b"s" * 8)),
            is_system_fixed=rng.random() < 0.2,
            is_trust_limited=rng.random() < 0.2,
            max_unit_cfo=rng.choice((math.inf, 0.6)),
        )
        names = [f"{i:016x}" for i in range(5)]
        pool = {name: drawn_variant(rng, name) for name in names}
        tiers = {tier: [pool[name] for name in rng.sample(names, rng.randint(0, 3))] for tier in TIERS}
        shares = {tier: rng.choice((0.0, 0.0, 0.1, 0.3, 0.7)) for tier in TIERS}
        held = NOTHING_HELD
        if rng.random() < 0.6:
            worst = rng.choice((None, rank_of(0, False), rank_of(1, True), rank_of(2, False)))
            held_names = frozenset(rng.sample(names, rng.randint(0, 2)))
            held = Held(rng.choice((0.0, 0.2, 0.5, 1.0)), rng.randint(0, 2), rng.random() < 0.2, held_names, worst)
        return cls(need, tiers, shares, held)

    def views(self, *, are_listed: bool = True) -> list[TierView]:
        return [
            TierView(tier, {one.name: one.traits for one in ones} if are_listed else {}, self.load_shares[tier])
            for tier, ones in self.tiers.items()
        ]

    def best(self) -> tuple[str, One] | None:
        """Of all variants in all tiers, by comparing each with what the pool has and with all others."""
        fitting = [
            (tier, one)
            for tier, ones in self.tiers.items()
            for one in ones
            if self.fits(one) and self.beats_pool(tier, one)
        ]
        if any(one.is_prepared for _, one in fitting):
            fitting = [(tier, one) for tier, one in fitting if one.is_prepared or one.generation == 0]
        best = None
        for tier, one in fitting:
            if best is None or self.value(tier, one) < self.value(*best):
                best = tier, one
        return best

    def fits(self, one: One) -> bool:
        held, need = self.held, self.need
        if one.generation > need.max_generation or (need.is_system_fixed and one.system != need.system):
            return False
        if need.is_trust_limited and not one.is_prepared and (one.context or one.generation):
            return False
        if need.unit_cfo(one) > need.max_unit_cfo:
            return False
        if one.name in held.names or (held.has_prepared and one.generation > 0 and not one.is_prepared):
            return False
        return held.worst_rank is None or (one.generation, not one.is_prepared) <= held.worst_rank

    def value(self, tier: str, one: One) -> tuple[float, int]:
        return self.need.unit_cfo(one) + self.load_shares[tier], one.generation

    def beats_pool(self, tier: str, one: One) -> bool:
        held = self.held
        return self.value(tier, one) < (held.share, held.generation)


def run(case: Case, search: VariantSearch[One], *, failing: frozenset[str] = frozenset()) -> tuple[str, One] | None:
    """The variant that is read in the end; those with these names cannot be."""
    asked: list[str] = []
    while (step := search.next()) is not None:
        assert search.next() == step, "nothing was reported"
        if isinstance(step, Ask):
            assert step.tier not in asked
            asked.append(step.tier)
            search.told(step.tier, case.tiers[step.tier])
        elif step.variant.name in failing:
            search.failed(step)
        else:
            return step.tier, step.variant
    return None


@pytest.mark.parametrize("block", range(4))
def test_the_best_variant_of_all_tiers_is_read(block: int) -> None:
    for seed in range(block, 4 * len(SEEDS), 4):
        case = Case.drawn(seed)
        search: VariantSearch[One] = VariantSearch(case.need, case.views(), held=case.held)
        assert run(case, search) == case.best(), f"seed {seed}"


def test_rank_names_all_that_are_of_use_in_order() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        left = replace_tiers(case)
        found = [(tier, one) for tier, ones in case.tiers.items() for one in ones]
        order = rank(found, case.need, case.load_shares, held=case.held)
        best = left.best()
        assert (order[0] if order else None) == best, f"seed {seed}"
        values = [case.value(*one) for one in order]
        assert values == sorted(values)
        assert all(case.fits(one) and case.beats_pool(tier, one) for tier, one in order)


def replace_tiers(case: Case) -> Case:
    return replace(case, tiers={tier: list(ones) for tier, ones in case.tiers.items()})


def test_what_cannot_be_read_is_as_if_it_were_not_there() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        failing = frozenset(random.Random(seed).sample([f"{i:016x}" for i in range(5)], 2))
        search: VariantSearch[One] = VariantSearch(case.need, case.views(), held=case.held)
        found = run(case, search, failing=failing)
        left = {tier: [one for one in ones if one.name not in failing] for tier, ones in case.tiers.items()}
        if found is None:
            assert replace(case, tiers=left).best() is None, f"seed {seed}"
        else:
            assert found[1].name not in failing
            assert case.fits(found[1])
            assert case.beats_pool(*found)


def test_tiers_that_nobody_listed_are_asked_until_one_has_it() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        search: VariantSearch[One] = VariantSearch(case.need, case.views(are_listed=False), held=case.held)
        found = run(case, search)
        if case.held.is_of_use:
            assert found is None, "nobody knows of anything better"
            continue
        first = next((tier for tier, ones in case.tiers.items() if any(map(case.fits, ones))), None)
        assert (None if found is None else found[0]) == first, f"seed {seed}"


def test_what_is_expected_is_at_least_as_good_as_what_is_read() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        search: VariantSearch[One] = VariantSearch(case.need, case.views(), held=case.held)
        expected, best = search.expected, case.best()
        if best is None:
            continue
        assert expected is not None
        if case.held.is_of_use:
            assert expected.share >= min(1.0, case.held.share - case.need.unit_cfo(best[1])) - 1e-9, f"seed {seed}"


def test_a_tier_that_others_write_to_may_have_what_nobody_knows_of() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        search: VariantSearch[One] = VariantSearch(case.need, case.views(), held=case.held)
        assert search.likely([]) == search.expected
        unknown = None if case.held.is_of_use else Expected("remote", 1.0)
        assert search.likely(["remote", "other"]) == (search.expected or unknown)


def test_what_a_ledger_knows_is_a_bound() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        for one in itertools.chain(*case.tiers.values()):
            assert least_unit_cfo(one.traits, case.need) <= case.need.unit_cfo(one)


def test_what_has_arrived_is_compared_without_its_load() -> None:
    for seed in SEEDS:
        case = Case.drawn(seed)
        case.load_shares = dict.fromkeys(TIERS, 0.0)
        for one in itertools.chain(*case.tiers.values()):
            passed_over = case.held.has_prepared and one.generation > 0 and not one.is_prepared
            expected = case.beats_pool("host", one) and not passed_over
            assert is_better(one, case.need, case.held) == expected


def test_a_better_variant_below_is_worth_its_load_or_not() -> None:
    """The pool's is behind another context: CFO 1. The disk has that of this context; loading takes a share of it."""
    need = Need(3, (b"a",))
    here = One("0" * 16, 0, False, (b"a",))
    for share, expected in ((0.5, Read("disk", here)), (1.5, None)):
        search: VariantSearch[One] = VariantSearch(
            need, [TierView("disk", {here.name: here.traits}, share)], held=Held(1.0, 1, False, frozenset(), None)
        )
        if expected is not None:
            assert search.next() == Ask("disk")
            search.told("disk", [here])
        assert search.next() == expected


# Load or compute.


def test_load_or_compute_as_an_obvious_program_says() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        channels = {tier: ThroughputRecord(rng.random() / 100, rng.random() / 1e7) for tier in TIERS}
        prefill = PrefillRecord(rng.random() / 100, rng.random() / 1000, rng.random() / 1e6)
        options, anyway = (
            [
                LoadOption(rng.choice(TIERS), rng.randint(1, 10**6), rng.randint(1, 50), 100, is_anyway)
                for _ in range(num)
            ]
            for num, is_anyway in ((rng.randint(0, 3), False), (rng.randint(0, 3), True))
        )
        queued = {tier: rng.choice((0, 10**5)) for tier in TIERS}
        overlaps, hidden_s = rng.random() < 0.5, rng.choice((0.0, 0.05))
        ratio, timeout_s = 0.15, rng.choice((0.3, 30.0))
        plan = LoadingController(overlaps=overlaps).load_or_compute(
            [*options, *anyway], channels, prefill,
            queued_bytes=queued, hidden_s=hidden_s, ratio=ratio, timeout_s=timeout_s,
        )  # fmt: skip
        ahead = dict(queued)
        computing = hidden_s
        if overlaps:
            num_rows = round(ratio * sum(option.num_rows for option in options))
            computing += prefill.estimate(num_rows, 100 if options or anyway else 0)
        last, worth, actions = 0.0, 0.0, []
        for option in options:
            channel = channels[option.tier]
            load_s = channel.latency_s + (option.num_bytes + ahead[option.tier]) * channel.s_per_byte
            compute_s = option.num_rows * (prefill.s_per_row + 100 * prefill.s_per_pair)
            waits_with = max(computing, last, load_s)  # for the first token, were it loaded
            waits_without = (computing if overlaps else max(computing, last)) + compute_s
            is_loaded = waits_with <= max(waits_without, computing, last)
            actions.append("load" if is_loaded else "compute")
            if is_loaded:
                ahead[option.tier] += option.num_bytes
                last = max(last, load_s)
                worth += compute_s
            elif overlaps:
                computing += compute_s
        decided = [None if decision is None else decision.action for decision in plan.decisions]
        assert decided == [*actions, *[None] * len(anyway)], f"seed {seed}"
        worth += last
        for option in anyway:
            channel = channels[option.tier]
            worth += channel.latency_s + option.num_bytes * channel.s_per_byte
            worth += option.num_rows * (prefill.s_per_row + 100 * prefill.s_per_pair)
        patience = hidden_s + 2 * worth if 2 * worth > MIN_PATIENCE_S else hidden_s + MIN_PATIENCE_S
        assert plan.patience_s == pytest.approx(min(patience, timeout_s)), f"seed {seed}"
        assert plan.is_short == (plan.patience_s < timeout_s), f"seed {seed}"


def test_a_load_costs_what_nothing_hides() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        load, compute, hidden = (Fraction(rng.randint(least, 20)) for least in (0, 1, 0))
        waited = max(hidden, load) - hidden
        assert load_share(float(load), float(compute), float(hidden)) == pytest.approx(float(waited / compute))


# Place and replace.


def test_replace_as_an_obvious_program_says() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        peers = {i: drawn_variant(rng, str(i)).traits for i in range(rng.randint(0, 4))}
        new, most = drawn_variant(rng, "new").traits, rng.randint(1, 4)
        prepared = [i for i, traits in peers.items() if traits.is_prepared]
        worse = [i for i, traits in peers.items() if (traits.generation, not traits.is_prepared) >= new.rank]
        expected: list[int] | None
        if new.is_prepared and prepared:
            expected = prepared
        elif len(peers) < most:
            expected = []
        else:
            expected = worse[:1] or None
        assert placing.replace(new, peers, most) == expected, f"seed {seed}"


def test_targets_as_a_table_says() -> None:
    for num in range(1, len(TIERS) + 1):
        for tiers, write, moment in itertools.product(itertools.combinations(TIERS, num), WRITES, Moment):
            expected: list[str] = []
            for i, tier in enumerate(tiers):
                goes = {
                    (Moment.STORED, "through"): True,
                    (Moment.LEAVES_POOL, "through"): True,
                    (Moment.LEAVES_POOL, "evict"): i == 0,
                    (Moment.LEAVES_HOST, "evict"): i == 1,
                    (Moment.LOADED, write): i == 0 and tier == "host",
                }.get((moment, write), False)
                expected += [tier] * goes
            assert targets(tiers, moment, write=write) == tuple(expected), (tiers, write, moment)


def test_place_writes_where_it_is_not_and_may_be() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        names, most = [f"{i:016x}" for i in range(4)], rng.randint(1, 3)
        ones = {name: drawn_variant(rng, name) for name in names}
        ledgers = {tier: TierLedger(None) for tier in TIERS}
        for ledger in ledgers.values():
            for name in rng.sample(names, rng.randint(0, 3)):
                entry_id = EntryId(b"k", name)
                assert ledger.prepare_store(entry_id, 1, traits=ones[name].traits) == ()
                assert ledger.complete_store(entry_id, True)
            for name in rng.sample(names, 2):
                ledger.touch(EntryId(b"k", name))
        new = ones[names[0]]
        actions = {action.tier: action for action in place(EntryId(b"k", new.name), new.traits, ledgers, most)}
        for tier, ledger in ledgers.items():
            there = [entry_id for entry_id in ledger if entry_id.key == b"k"]  # in the order in which they go
            assert list(ledger.peers_of(b"k").items()) == [(one, ones[one.name].traits) for one in there]
            if new.name in [entry_id.name for entry_id in there]:
                assert actions.get(tier) == Known(tier)
                continue
            replaced = placing.replace(new.traits, ledger.peers_of(b"k"), most)
            assert actions.get(tier) == (None if replaced is None else Write(tier, tuple(replaced)))
