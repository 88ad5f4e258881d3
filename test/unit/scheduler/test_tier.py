"""The ledger of a tier: its promises, one by one."""

from __future__ import annotations

import pytest

from chunk_cache.tier_ledger import TierLedger
from chunk_cache.victims import AGEING


def stored(tier: TierLedger, *entry_ids: str, num_bytes: int = 1, worth: float = 0.0) -> None:
    for entry_id in entry_ids:
        assert tier.prepare_store(entry_id, num_bytes, worth=worth) is not None
        assert tier.complete_store(entry_id, True)
        tier.check_integrity()


def test_what_is_written_counts_but_is_not_found() -> None:
    tier = TierLedger(10)
    assert tier.prepare_store("aa-0", 4) == ()
    assert (tier.num_bytes, len(tier), tier.contains("aa-0"), tier.entries_of("aa")) == (4, 0, False, ())
    assert not tier.prepare_load("aa-0")
    assert not tier.touch("aa-0")
    assert tier.complete_store("aa-0", True)
    assert (tier.num_bytes, len(tier), tier.contains("aa-0"), tier.entries_of("aa")) == (4, 1, True, ("aa-0",))


def test_failed_write_leaves_nothing() -> None:
    tier = TierLedger(10)
    tier.prepare_store("aa-0", 4)
    assert not tier.complete_store("aa-0", False)
    assert (tier.num_bytes, len(tier), tier.stats()["failed_stores"]) == (0, 0, 1)
    stored(tier, "aa-0")


def test_room_is_made_all_or_nothing() -> None:
    tier = TierLedger(4)
    stored(tier, "aa-0", "bb-0", "cc-0", "dd-0")
    assert tier.prepare_load("bb-0")
    tier.pin("cc-0")
    assert tier.prepare_store("ee-0", 3) is None
    assert list(tier) == ["aa-0", "bb-0", "cc-0", "dd-0"]
    assert tier.prepare_store("ee-0", 2) == ("aa-0", "dd-0")
    assert list(tier) == ["bb-0", "cc-0"]
    assert tier.num_bytes == 4
    tier.check_integrity()


@pytest.mark.parametrize("reason", ["stored", "writing", "leaving", "too_big", "protected"])
def test_refusals_are_counted_by_reason(reason: str) -> None:
    tier = TierLedger(4)
    tier.prepare_store("aa-0", 3)
    if reason != "writing":
        tier.complete_store("aa-0", True)
    if reason == "leaving":
        tier.prepare_load("aa-0")
        assert tier.discard("aa-0")
    tier.pin("aa-0")
    entry_id, num_bytes = {"too_big": ("bb-0", 5), "protected": ("bb-0", 2)}.get(reason, ("aa-0", 3))
    assert tier.prepare_store(entry_id, num_bytes) is None
    refused = {name: count for name, count in tier.stats().items() if name.startswith("refused_") and count}
    assert refused == {f"refused_{reason}": 1}


def test_least_recently_used_goes_first() -> None:
    tier = TierLedger(3)
    stored(tier, "aa-0", "bb-0", "cc-0")
    assert tier.touch("aa-0")
    assert list(tier) == ["bb-0", "cc-0", "aa-0"]
    assert tier.prepare_store("dd-0", 2) == ("bb-0", "cc-0")


def test_a_load_is_no_use() -> None:
    tier = TierLedger(2)
    stored(tier, "aa-0", "bb-0")
    assert tier.prepare_load("aa-0")
    tier.complete_load("aa-0", True)
    assert tier.prepare_store("cc-0", 1) == ("aa-0",)


def test_least_reuse_frequency_goes_first_and_newcomers_age_the_rest() -> None:
    tier = TierLedger(2, "frequency-reuse", ageing=1.0)
    stored(tier, "aa-0", worth=3.0)
    stored(tier, "bb-0")
    tier.touch("bb-0", 2.0)
    assert list(tier) == ["bb-0", "aa-0"]
    assert tier.prepare_store("cc-0", 1) == ("bb-0",)
    assert tier.age == 2.0 + 1.0 / 2  # the victim's worth, and half a turnover
    assert tier.complete_store("cc-0", True)
    tier.touch("cc-0", 1.0)
    assert list(tier) == ["aa-0", "cc-0"]  # 3.0 of old, 3.5 by age


def test_nested_loads_protect_until_the_last() -> None:
    tier = TierLedger(1)
    stored(tier, "aa-0")
    assert tier.prepare_load("aa-0")
    assert tier.prepare_load("aa-0")
    tier.complete_load("aa-0", True)
    assert tier.prepare_store("bb-0", 1) is None
    tier.complete_load("aa-0", True)
    assert tier.prepare_store("bb-0", 1) == ("aa-0",)


def test_corrupt_entry_is_not_found_while_others_still_read_it() -> None:
    tier = TierLedger(4)
    stored(tier, "aa-0", "aa-1")
    for _ in range(2):
        assert tier.prepare_load("aa-0")
    tier.complete_load("aa-0", False)
    assert (tier.contains("aa-0"), tier.entries_of("aa"), tier.num_bytes) == (False, ("aa-1",), 2)
    assert not tier.prepare_load("aa-0")
    assert not tier.discard("aa-0")
    tier.complete_load("aa-0", True)
    assert tier.num_bytes == 1
    stored(tier, "aa-0")


def test_discarded_while_written_is_never_found() -> None:
    tier = TierLedger(4)
    tier.prepare_store("aa-0", 2)
    assert tier.discard("aa-0")
    assert tier.num_bytes == 2
    assert not tier.complete_store("aa-0", True)
    assert tier.num_bytes == 0


def test_pins_are_of_ids_and_counted() -> None:
    tier = TierLedger(1)
    tier.pin("aa-0")
    tier.pin("aa-0")
    stored(tier, "aa-0")
    tier.unpin("aa-0")
    assert tier.prepare_store("bb-0", 1) is None
    assert tier.discard("aa-0")
    stored(tier, "aa-0")
    assert tier.prepare_store("bb-0", 1) is None
    tier.unpin("aa-0")
    assert tier.prepare_store("bb-0", 1) == ("aa-0",)


def test_unbounded_tier_evicts_nothing() -> None:
    tier = TierLedger(None, "frequency-reuse")
    stored(tier, *(f"{i:02x}-0" for i in range(50)), num_bytes=1 << 40)
    assert (len(tier), tier.stats()["evictions"], tier.age) == (50, 0, 0.0)


def test_variants_of_a_chunk_are_found_by_its_key() -> None:
    tier = TierLedger(3)
    stored(tier, "aa-exact", "ab-exact", "aa-neighbours-4")
    assert tier.entries_of("aa") == ("aa-exact", "aa-neighbours-4")
    stored(tier, "cc-exact")
    assert tier.entries_of("aa") == ("aa-neighbours-4",)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda tier: tier.complete_store("aa-0", True),
        lambda tier: tier.complete_load("aa-0", True),
        lambda tier: tier.unpin("aa-0"),
        lambda tier: tier.prepare_store("bb-0", 0),
        lambda tier: tier.touch("aa-0", -1.0),
        lambda tier: TierLedger(1, "fifo"),
    ],
)
def test_what_cannot_happen(misuse) -> None:
    tier = TierLedger(4)
    stored(tier, "aa-0")
    with pytest.raises(AssertionError):
        misuse(tier)


def test_heap_stays_bounded() -> None:
    tier = TierLedger(8, "frequency-reuse", AGEING)
    stored(tier, *(f"{i:02x}-0" for i in range(8)))
    for i in range(2000):
        entry_id = f"{i % 8:02x}-0"
        tier.touch(entry_id, 0.5)
        assert tier.prepare_load(entry_id)
        tier.complete_load(entry_id, True)
    assert len(tier._heap) <= 2 * len(tier) + 64
    tier.check_integrity()
