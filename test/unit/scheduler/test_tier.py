"""The ledger of a tier: its promises, one by one."""

from __future__ import annotations

import pytest

from chunk_cache.index.victims import AGEING
from chunk_cache.tiers.tier_ledger import EntryId, TierLedger, Traits, context_digest

FIRST, SECOND = "0" * 16, "1" * 16
A, B, C, D, E = (EntryId(key, FIRST) for key in (b"a", b"b", b"c", b"d", b"e"))
A1 = EntryId(b"a", SECOND)
ONE, OTHER = b"one".ljust(16), b"other".ljust(16)


def stored(tier: TierLedger, *entry_ids: EntryId, num_bytes: int = 1) -> None:
    for entry_id in entry_ids:
        assert tier.prepare_store(entry_id, num_bytes) is not None
        assert tier.complete_store(entry_id, True)
        tier.check_integrity()


def test_what_is_written_counts_but_is_not_found() -> None:
    tier = TierLedger(10)
    assert tier.prepare_store(A, 4) == ()
    assert (tier.num_bytes, len(tier), tier.contains(A), tier.entries_of(b"a")) == (4, 0, False, ())
    assert not tier.touch(A)
    assert tier.complete_store(A, True)
    assert (tier.num_bytes, len(tier), tier.contains(A), tier.entries_of(b"a")) == (4, 1, True, (A,))


def test_failed_write_leaves_nothing() -> None:
    tier = TierLedger(10)
    tier.prepare_store(A, 4)
    assert not tier.complete_store(A, False)
    assert (tier.num_bytes, len(tier), tier.stats()["failed_stores"]) == (0, 0, 1)
    stored(tier, A)


def test_room_is_made_all_or_nothing() -> None:
    tier = TierLedger(4)
    stored(tier, A, B)
    tier.prepare_store(C, 2)
    assert tier.prepare_store(E, 3) is None
    assert list(tier) == [A, B]
    assert tier.prepare_store(E, 2) == (A, B)
    assert list(tier) == []
    assert tier.num_bytes == 4
    tier.check_integrity()


@pytest.mark.parametrize("reason", ["stored", "writing", "leaving", "too_big", "protected"])
def test_refusals_are_counted_by_reason(reason: str) -> None:
    tier = TierLedger(4)
    tier.prepare_store(A, 3)
    if reason == "stored":
        tier.complete_store(A, True)
    if reason == "leaving":
        assert tier.discard(A)
    entry_id, num_bytes = {"too_big": (B, 5), "protected": (B, 2)}.get(reason, (A, 3))
    assert tier.prepare_store(entry_id, num_bytes) is None
    refused = {name: count for name, count in tier.stats().items() if name.startswith("refused_") and count}
    assert refused == {f"refused_{reason}": 1}


def test_least_recently_used_goes_first() -> None:
    tier = TierLedger(3)
    stored(tier, A, B, C)
    assert tier.touch(A)
    assert list(tier) == [B, C, A]
    assert tier.prepare_store(D, 2) == (B, C)


def test_a_read_is_no_use() -> None:
    tier = TierLedger(2)
    stored(tier, A, B)
    tier.note_read(A, is_corrupt=False)
    tier.note_read(C, is_corrupt=False)
    assert (tier.stats()["hits"], tier.stats()["misses"]) == (1, 1)
    assert tier.prepare_store(C, 1) == (A,)


def test_least_reuse_frequency_goes_first_and_newcomers_age_the_rest() -> None:
    tier = TierLedger(2, "frequency-reuse", ageing=1.0)
    stored(tier, A, B)
    for entry_id in (A, B, A, B, A):
        tier.touch(entry_id)
    assert list(tier) == [B, A]
    assert tier.prepare_store(C, 1) == (B,)
    assert tier.age == 2.0 + 1.0 / 2  # the victim's worth, and half a turnover
    assert tier.complete_store(C, True)
    tier.touch(C)
    assert list(tier) == [A, C]  # 3.0 of old, 3.5 by age


def test_a_corrupt_entry_is_not_found() -> None:
    tier = TierLedger(4)
    stored(tier, A, A1)
    tier.note_read(A, is_corrupt=True)
    assert (tier.contains(A), tier.entries_of(b"a"), tier.num_bytes) == (False, (A1,), 1)
    assert (tier.stats()["hits"], tier.stats()["corrupt"], tier.stats()["discards"]) == (1, 1, 1)
    assert not tier.discard(A)
    stored(tier, A)


def test_discarded_while_written_is_never_found() -> None:
    tier = TierLedger(4)
    tier.prepare_store(A, 2)
    assert tier.discard(A)
    assert not tier.discard(A)
    assert tier.num_bytes == 2
    assert not tier.complete_store(A, True)
    assert tier.num_bytes == 0


def test_unbounded_tier_evicts_nothing() -> None:
    tier = TierLedger(None, "frequency-reuse")
    stored(tier, *(EntryId(b"%d" % i, FIRST) for i in range(50)), num_bytes=1 << 40)
    assert (len(tier), tier.stats()["evictions"], tier.age) == (50, 0, 0.0)


def test_variants_of_a_chunk_are_found_by_its_key() -> None:
    tier = TierLedger(3)
    stored(tier, A, B, A1)
    assert tier.entries_of(b"a") == (A, A1)
    stored(tier, C)
    assert tier.entries_of(b"a") == (A1,)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda tier: tier.complete_store(A, True),
        lambda tier: tier.prepare_store(B, 0),
        lambda tier: TierLedger(1, "fifo"),
    ],
)
def test_what_cannot_happen(misuse) -> None:
    tier = TierLedger(4)
    stored(tier, A)
    with pytest.raises(AssertionError):
        misuse(tier)


def test_traits_are_kept_in_mind() -> None:
    tier = TierLedger(None)
    traits = Traits(1 << 40, True, context_digest((b"c" * 16,)))
    tier.prepare_store(A, 7, traits=traits)
    tier.complete_store(A, True)
    stored(tier, A1)
    tier.touch(A, 2.0)
    assert (tier.num_bytes_of(A), tier.frequency_of(A)) == (7, 2.0)
    assert (tier.peers_of(b"a"), tier.keys()) == ({A: traits, A1: Traits()}, [b"a"])
    assert traits.context != Traits().context == context_digest(())


def test_heap_stays_bounded() -> None:
    tier = TierLedger(8, "frequency-reuse", AGEING)
    entry_ids = [EntryId(b"%d" % i, FIRST) for i in range(8)]
    stored(tier, *entry_ids)
    for i in range(2000):
        tier.touch(entry_ids[i % 8])
    assert len(tier._heap) <= 2 * len(tier) + 64
    tier.check_integrity()


def test_a_partition_makes_room_out_of_its_own() -> None:
    tier = TierLedger(10, partition_share=0.5)
    quiet, noisy = ONE, OTHER
    stored(tier, A)  # of the default partition, and used longest ago
    for number in range(20):
        entry_id = EntryId(b"n%d" % number, FIRST)
        gone = tier.prepare_store(entry_id, 1, partition=noisy)
        assert gone == (() if number < 5 else (EntryId(b"n%d" % (number - 5), FIRST),))
        assert tier.complete_store(entry_id, True)
        tier.check_integrity()
    assert tier.prepare_store(B, 4, partition=quiet) == ()
    assert tier.contains(A)
    assert (tier.quota.held(noisy), tier.quota.held(quiet), tier.stats()["share_evictions"]) == (5, 4, 15)


def test_heaps_of_partitions_stay_small() -> None:
    tier = TierLedger(10, partition_share=0.5)
    for number in range(2000):
        entry_id = EntryId(b"n%d" % number, FIRST)
        tier.prepare_store(entry_id, 1, partition=(b"%d" % (number % 100)).ljust(16))
        tier.complete_store(entry_id, True)
    assert sum(map(len, tier._own_heaps.values())) <= 2 * len(tier) + 64
    assert len(tier._own_heaps) <= 2 * len(tier) + 64
    tier.check_integrity()


def test_what_is_too_big_for_a_share_is_refused() -> None:
    tier = TierLedger(10, partition_share=0.5)
    assert tier.refusal(A, 6, ONE) == "partition_share"
    assert tier.prepare_store(A, 6, partition=ONE) is None
    assert tier.prepare_store(B, 3, partition=ONE) == ()
    assert tier.prepare_store(C, 3, partition=ONE) is None, "the rest of its partition is being written"
    assert tier.stats()["refused_partition_share"] == 2
    assert tier.prepare_store(C, 3, partition=OTHER) == ()
    tier.check_integrity()
