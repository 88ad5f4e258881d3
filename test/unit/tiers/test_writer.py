"""TierWriter over real media: what is written when, what makes room, and what is left when something goes wrong."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunk_cache.index.quota import Shares
from chunk_cache.index.variant import PathTokens, Variant
from chunk_cache.keys import Partition
from chunk_cache.tiers.cost import PrefillCost
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.assembler import HostKV
from sglang_chunk_cache.kv.ranks import of_one_rank
from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.kv.transition import Transition
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers import writer as writer_module
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.manager import ChunkTiers
from sglang_chunk_cache.tiers.tier import Tier
from unit.tiers.medium_suite import FINGERPRINT, STATES, assert_same
from unit.tiers.tier_harness import LENGTH, SIZE, DictPool, Tiers, kv_of, open_tiers, stored, variant, wanted

HOST = {"host": 1 << 20}


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Host and disk, written through."""
    with open_tiers({"disk": tmp_path}, limits=HOST) as opened:
        yield opened


def names(tiers: Tiers, tier: str) -> list[int]:
    """Numbers of the chunks that a tier holds."""
    return sorted(info.token_ids[0] // 1000 for info in tiers.tier(tier).medium.scan())


def entry_id(one: Variant) -> EntryId:
    return stored(one).info.entry_id


# When.


def test_through_writes_to_every_tier_at_once(tiers: Tiers) -> None:
    one = variant(1, start=4)
    tiers.writer.note_stored(one)
    tiers.check()
    for tier in tiers.tiers:
        (info,) = tier.medium.find(one.key)
        assert_same(tier.medium.read(info), stored(one))
    assert tiers.pool.num_gathered == 1, "the pool is read once for all tiers"
    assert sorted(tiers.counted) == [("disk", "ok"), ("host", "ok")]


def test_what_was_not_written_through_is_saved_before_an_eviction(tiers: Tiers) -> None:
    tiers.writer.save_victims([variant(1)], 100)
    tiers.check()
    assert tiers.pool.num_gathered == 1
    tiers.writer.save_victims([variant(1)], 100)
    assert tiers.pool.num_gathered == 1


def test_evict_writes_what_is_about_to_go(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        variants = [variant(i) for i in range(4)]
        for one in variants:
            tiers.writer.note_stored(one)
        tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([], [])
        tiers.writer.save_victims(iter(variants), 2 * variants[0].length - 1)
        tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([0, 1], [])


def test_evict_copies_nothing_twice(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        for _ in range(3):
            tiers.writer.save_victims([variant(1), variant(2)], 10)
            tiers.check()
        assert tiers.pool.num_gathered == 2


def test_evict_without_a_host_tier_goes_to_disk(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, write="evict") as tiers:
        tiers.writer.save_victims([variant(1)], 5)
        tiers.check()
        assert names(tiers, "disk") == [1]


def test_what_has_left_the_pool_is_not_written(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        gone = variant(1)
        tiers.pool.gone.add(gone.variant_id)
        tiers.writer.save_victims([gone, variant(2)], gone.length)
        tiers.check()
        assert names(tiers, "host") == [2], "it freed nothing, so another goes"


def test_what_lies_below_and_stays_in_the_pool_stands_for_no_other(tmp_path: Path) -> None:
    """Its order is the index's; SGLang evicts in the order of its tree, where a variant may have been used since."""
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        for number in range(1, 5):
            tiers.writer.save_victims([variant(0), variant(number)], LENGTH)
            tiers.check()
        assert names(tiers, "host") == [0, 2, 3, 4], "one at each eviction, the first of them that which stayed"


def test_what_is_saved_and_stays_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        looked_at = []
        save = tiers.writer._save
        monkeypatch.setattr(tiers.writer, "_save", lambda one, moment: (looked_at.append(one), save(one, moment))[1])
        stays = [variant(number) for number in range(3)]
        for number in (3, 4):
            tiers.writer.save_victims([*stays, variant(number)], 3 * LENGTH)
            tiers.check()
        assert [one.variant_id for one in looked_at] == [one.variant_id for one in (*stays, variant(4))]


def test_an_eviction_looks_at_a_few_only(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, write="evict") as tiers:
        seen = []

        def variants() -> Iterator[Variant]:
            for i in range(10 * writer_module.MAX_LOOKS):
                seen.append(i)
                tiers.pool.gone.add(variant(i).variant_id)
                yield variant(i)

        tiers.writer.save_victims(variants(), 10**9)
        assert len(seen) <= writer_module.MAX_LOOKS + 1


def test_so_many_variants_of_a_chunk(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, max_variants_per_chunk=2) as tiers:
        for start in range(4):
            tiers.writer.note_stored(variant(1, start=start))
            tiers.idle()
        tiers.writer.note_stored(variant(1, start=9, generation=1))
        tiers.check()
        for tier in tiers.tiers:
            starts = [info.start for info in tier.medium.find(wanted(1).key)]
            assert sorted(starts) == [2, 3], "the newest, of which a derived one takes no place"


def test_a_variant_that_is_not_taken_displaces_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tiers({"disk": tmp_path}, max_variants_per_chunk=2) as tiers:
        for start in range(2):
            tiers.writer.note_stored(variant(1, start=start))
            tiers.idle()
        monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", -1)
        tiers.writer.note_stored(variant(1, start=2))
        tiers.check()
        assert tiers.counted[-1] == ("disk", "busy")
        assert sorted(info.start for info in tiers.tier("disk").medium.find(wanted(1).key)) == [0, 1]


def test_what_the_pool_used_often_stays(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits={"disk": 2 * SIZE}, eviction="frequency-reuse") as tiers:
        variants = [variant(i) for i in range(3)]
        for one in variants[:2]:
            tiers.writer.note_stored(one)
            tiers.idle()
        variants[0].reuse_frequency = 5.0
        tiers.writer.save_victims(variants[:1], LENGTH)
        tiers.writer.note_stored(variants[2])
        tiers.idle()
        assert names(tiers, "disk") == [0, 2]


# How much.


def test_budgets_are_kept_and_the_least_recent_go(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits={"host": 3 * SIZE, "disk": 5 * SIZE + 1}) as tiers:
        for i in range(9):
            tiers.writer.note_stored(variant(i))
            tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([6, 7, 8], [4, 5, 6, 7, 8])


def test_a_partition_at_its_share_makes_room_out_of_its_own(tmp_path: Path) -> None:
    noisy = Partition("noisy")
    with open_tiers({"disk": tmp_path}, limits={"disk": 6 * SIZE}) as tiers:
        tiers.tier("disk").ledger.quota = Shares(6 * SIZE, 0.5)
        for i in (0, 1):
            tiers.writer.note_stored(variant(i))
        for i in range(2, 12):
            one = variant(i)
            one.holder = PathTokens(one.holder.tokens, noisy)
            tiers.writer.note_stored(one)
            tiers.check()
        assert names(tiers, "disk") == [0, 1, 9, 10, 11]
        assert tiers.tier("disk").ledger.stats()["share_evictions"] == 7
        owners = [info.partition for info in tiers.tier("disk").medium.scan()]
        assert owners.count(noisy.key) == 3, "the folder tells the next server"


def test_a_host_tier_that_is_full_hands_down(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits={"host": 2 * SIZE, "disk": 3 * SIZE}, write="evict") as tiers:
        variants = [variant(i) for i in range(7)]
        for one in variants:
            tiers.writer.save_victims([one], 1)
            tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([5, 6], [2, 3, 4])
        for one in variants[2:5]:
            (info,) = tiers.tier("disk").medium.find(one.key)
            assert_same(tiers.tier("disk").medium.read(info), stored(one))


def test_what_is_too_big_is_refused_and_counted(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits={"host": 1 << 20, "disk": SIZE - 1}) as tiers:
        tiers.writer.note_stored(variant(1))
        tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([1], [])
        assert ("disk", "refused") in tiers.counted


def test_while_too_much_waits_to_be_written_nothing_more_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 2 * SIZE)
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.1)}) as tiers:
        for i in range(5):
            tiers.writer.note_stored(variant(i))
        assert tiers.counted == [("disk", "busy")] * 2
        tiers.check()
        assert names(tiers, "disk") == [0, 1, 2]
        tiers.writer.note_stored(variant(4))
        tiers.check()
        assert names(tiers, "disk") == [0, 1, 2, 4]


def test_the_kv_is_read_when_it_is_there(tmp_path: Path) -> None:
    """On a GPU the copy is on its way when it is handed over."""
    one, there, waited = stored(variant(1)), threading.Event(), []

    def wait() -> None:
        assert there.wait(10)
        late.k.copy_(one.k)
        late.v.copy_(one.v)
        waited.append(threading.current_thread() is not threading.main_thread())

    late = HostKV(torch.zeros_like(one.k), torch.zeros_like(one.v), SimpleNamespace(synchronize=wait))
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.pool.kv_of = lambda _: late  # type: ignore[method-assign]
        tiers.writer.note_stored(variant(1))
        there.set()
        tiers.check()
        assert waited == [True]
        assert_same(tiers.tier("disk").medium.read(one.info), one)


def test_what_a_chunk_does_to_states_is_written_in_one_part(tmp_path: Path) -> None:
    """A chunk that was computed in two steps."""
    fingerprint = replace(FINGERPRINT, states=STATES)
    first, second = (random_transition(seed) for seed in (1, 2))
    with open_tiers({"disk": tmp_path}, limits={"host": 1 << 20}, fingerprint=fingerprint) as tiers:
        kv = replace(kv_of(variant(1)), transition=first.then(second))
        tiers.pool.kv_of = lambda _: kv  # type: ignore[method-assign]
        tiers.writer.note_stored(variant(1))
        tiers.check()
        for name in ("host", "disk"):
            tier = tiers.tier(name)
            assert tier.ledger.num_bytes == SIZE + STATES.num_bytes
            (info,) = tier.medium.find(variant(1).key)
            found = tier.medium.read(info)
            assert torch.equal(found.k.view(torch.uint8), kv.k.view(torch.uint8))
            assert found.transition is not None
            state = torch.randn(STATES.heads, STATES.value_size, STATES.key_size)
            for layer, *parts in zip(found.transition.layers, first.layers, second.layers, strict=True):
                expected = state
                for part in parts:
                    expected = expected @ part.rules[0].operator + part.rules[0].offset
                operator, offset, tail = layer.parts
                torch.testing.assert_close(state @ operator + offset, expected)
                assert torch.equal(tail, parts[1].tails[0])


def random_transition(seed: int) -> Transition:
    transition, generator = STATES.empty(), torch.Generator().manual_seed(seed)
    for layer in transition.layers:
        for part in layer.parts:
            part.copy_(torch.randn(part.shape, generator=generator))
    return transition


# What was there before.


def test_a_new_server_has_what_is_in_the_folder(tmp_path: Path) -> None:
    medium = DiskMedium(tmp_path, FINGERPRINT)
    for i in range(6):
        medium.write(stored(variant(i)))
    with open_tiers({"disk": tmp_path}, limits={"disk": 4 * SIZE}) as tiers:
        tier = tiers.tier("disk")
        opened = ChunkTiers(
            tiers.config,
            [tier],
            pool=DictPool(),
            metrics=TierMetrics(enabled=False),
            fingerprint=FINGERPRINT,
            ratio=0.15,
            reduce_max=of_one_rank,
            prefill_cost=PrefillCost(),
        )
        for _ in range(200):
            opened.wait(0.05)
            if len(tier.ledger) == 4 and len(list(tier.medium.scan())) == 4:
                break
        assert opened.stats()["tiers"]["disk"]["entries"] == 4, "it keeps within its budget"
        tiers.check()
        opened.close()


def test_what_others_write_is_adopted_once(tiers: Tiers) -> None:
    tier, one = tiers.tier("disk"), stored(variant(1))
    tier.medium.write(one)
    for _ in range(2):
        tiers.writer.adopt(tier, one.info.listed)
        tiers.check()
    assert names(tiers, "disk") == [1]
    tiers.writer.note_stored(variant(1))
    tiers.check()
    assert ("disk", "ok") not in tiers.counted, "it is there already"


def test_what_is_adopted_makes_others_go(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits={"disk": 2 * SIZE}) as tiers:
        for i in range(2):
            tiers.writer.note_stored(variant(i))
            tiers.idle()
        one = stored(variant(2))
        tiers.tier("disk").medium.write(one)
        tiers.writer.adopt(tiers.tier("disk"), one.info.listed)
        tiers.check()
        assert names(tiers, "disk") == [1, 2]


# What goes.


def test_forgotten_means_deleted(tiers: Tiers) -> None:
    tiers.writer.note_stored(variant(1))
    tiers.idle()
    for tier in tiers.tiers:
        tiers.writer.forget(tier, stored(variant(1)).info.entry_id)
    tiers.check()
    assert names(tiers, "host") == names(tiers, "disk") == []
    tiers.writer.note_stored(variant(1))
    tiers.check()
    assert names(tiers, "host") == names(tiers, "disk") == [1]


def test_forgotten_while_it_is_written(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.1)}) as tiers:
        tiers.writer.note_stored(variant(1))
        tiers.writer.forget(tiers.tier("disk"), stored(variant(1)).info.entry_id)
        tiers.check()
        assert names(tiers, "disk") == []


def test_stored_again_while_the_old_file_is_being_deleted(tmp_path: Path) -> None:
    """A damaged file is deleted, and its chunk computed and written, at about the same time."""
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.05)}) as tiers:
        for _ in range(10):
            tiers.writer.note_stored(variant(1))
            tiers.check()
            tiers.writer.forget(tiers.tier("disk"), stored(variant(1)).info.entry_id)
        tiers.check()


def test_a_flush_empties_the_host_tier_alone(tiers: Tiers) -> None:
    for i in range(3):
        tiers.writer.note_stored(variant(i))
    tiers.idle()
    tiers.writer.clear_host()
    tiers.check()
    assert (names(tiers, "host"), names(tiers, "disk")) == ([], [0, 1, 2])


def test_a_flush_while_the_host_tier_is_written_to(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST, slow={"host": (1e9, 0.05)}) as tiers:
        for i in range(3):
            tiers.writer.note_stored(variant(i))
        tiers.writer.clear_host()
        tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([], [0, 1, 2])


# Faults.


def test_a_disk_without_space(small_device: Path) -> None:
    with open_tiers({"disk": small_device}, limits=HOST) as tiers:
        filler = small_device / "filler"
        with pytest.raises(OSError, match="space"):
            filler.write_bytes(b"x" * (2 << 20))
        for i in range(3):
            tiers.writer.note_stored(variant(i))
        tiers.check()
        assert (names(tiers, "host"), names(tiers, "disk")) == ([0, 1, 2], [])
        assert tiers.counted.count(("disk", "full")) == 3
        filler.unlink()
        tiers.writer.note_stored(variant(1))
        tiers.check()
        assert names(tiers, "disk") == [1]


def test_host_memory_that_is_used_up_when_chunks_go_down(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def used_up(one: Variant) -> Any:
        asked.append(one)
        raise TierError("full", "host memory", "no 1 bytes left", "give the machine more")

    with monkeypatch.context() as patch:
        patch.setattr(tiers.pool, "kv_of", used_up)
        tiers.writer.note_stored(variant(1))
        tiers.writer.save_victims([variant(2), variant(3), variant(4)], 2 * LENGTH)
    tiers.check()
    assert len(asked) == 3, "no more than what is evicted"
    assert sorted(tiers.counted) == [("disk", "full")] * 3 + [("host", "full")] * 3
    tiers.writer.note_stored(variant(1))
    tiers.check()
    assert (names(tiers, "host"), names(tiers, "disk")) == ([1], [1])


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path / "root"}, limits=HOST) as tiers:
        tiers.writer.note_stored(variant(1))
        tiers.idle()
        shutil.rmtree(tmp_path / "root")
        tiers.writer.note_stored(variant(2))
        tiers.idle()
        assert names(tiers, "host") == [1, 2]
        assert ("disk", "unavailable") in tiers.counted
        assert not tiers.tier("disk").ledger.contains(entry_id(variant(2)))
        tiers.tier("disk").ledger.check_integrity()


# Everything at once.


def random_step(tiers: Tiers, rng: random.Random) -> None:
    one = variant(rng.randrange(8), start=rng.randrange(3))
    tier = rng.choice(tiers.tiers)
    action = rng.choice(["store", "store", "victims", "forget", "adopt", "flush", "wait", "step", "step"])
    if action == "store":
        tiers.writer.note_stored(one)
    elif action == "victims":
        tiers.writer.save_victims([variant(rng.randrange(8)) for _ in range(3)], rng.randrange(1, 20))
    elif action == "forget":
        tiers.writer.forget(tier, stored(one).info.entry_id)
    elif action == "adopt" and not tier.is_host:
        for info in tier.medium.find(one.key):
            tiers.writer.adopt(tier, info.listed)
    elif action == "flush" and rng.random() < 0.2:
        tiers.writer.clear_host()
    elif action == "wait":
        tiers.idle()
    else:
        tiers.workers.run_done()


@pytest.mark.parametrize("write", ["through", "evict"])
@pytest.mark.parametrize("seed", range(8))
def test_ledgers_agree_with_media_after_anything(tmp_path: Path, seed: int, write: str) -> None:
    rng = random.Random(seed)
    limits = {"host": rng.randrange(2, 6) * SIZE, "disk": rng.randrange(2, 8) * SIZE}
    folders = {"disk": tmp_path / "disk", "remote": tmp_path / "remote"}
    kwargs: dict[str, Any] = {"limits": limits, "write": write, "num_threads": rng.randrange(1, 4)}
    with open_tiers(folders, **kwargs) as tiers:
        for _ in range(40):
            for _ in range(8):
                random_step(tiers, rng)
                for tier in tiers.tiers:
                    tier.ledger.check_integrity()
            tiers.check()


def test_tiers_are_compared_by_identity(tiers: Tiers) -> None:
    """They are looked up in lists of tiers."""
    tier = tiers.tiers[0]
    twin = Tier(tier.name, tier.medium, tier.ledger)
    assert tiers.tiers.index(tier) == 0
    assert twin not in tiers.tiers
