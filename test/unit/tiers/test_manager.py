"""ChunkTiers with real media, and a real process group where ranks vote: one ratio for all; other weights."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from chunk_cache.options.config import parse_config
from chunk_cache.tiers.cost import PrefillCost
from sglang_chunk_cache.host.weight_updater import ChunkWeightUpdater
from sglang_chunk_cache.kv.ranks import max_over_ranks, of_one_rank
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.manager import ChunkTiers
from sglang_chunk_cache.tiers.registry import open_tiers
from sglang_signatures import overrides
from unit.tiers.medium_suite import FINGERPRINT
from unit.tiers.tier_harness import LENGTH, PATIENCE_S, SIZE, DictPool, search, stored, variant, wanted

NUM_TOKENS, NUM_KEYS = 40, 200


@pytest.fixture
def open_chunk_tiers(tmp_path: Path) -> Iterator[Callable[..., ChunkTiers]]:
    """With a disk tier; other keys of its configuration by name."""
    with ExitStack() as stack:

        def opened(folder: str = "disk", *, reduce_max: Any = of_one_rank, **tiers: Any) -> ChunkTiers:
            config = parse_config({"tiers": {"disk": {"path": str(tmp_path / folder)}, "controller": False, **tiers}})
            assert config.tiers is not None
            chunk_tiers = ChunkTiers(
                config.tiers,
                open_tiers(config, FINGERPRINT),
                pool=DictPool(),  # type: ignore[arg-type]
                metrics=TierMetrics(enabled=False),
                fingerprint=FINGERPRINT,
                ratio=0.15,
                reduce_max=reduce_max,
                prefill_cost=PrefillCost(),
            )
            return stack.enter_context(closing(chunk_tiers))

        yield opened


def idle(tiers: ChunkTiers) -> None:
    """What was submitted is done, and has taken effect."""
    while tiers._workers.num_running:
        tiers.wait(PATIENCE_S)
        tiers.poll(())


def on_disk(folder: Path) -> set[int]:
    """Numbers of the chunks."""
    return {info.token_ids[0] // 1000 for info in DiskMedium(folder, FINGERPRINT).scan()}


# What was prepared.


def test_prepared_chunks_are_known_after_a_restart(open_chunk_tiers: Callable[..., ChunkTiers], tmp_path: Path) -> None:
    disk = DiskMedium(tmp_path / "disk", FINGERPRINT)
    a, b = wanted(1).key, wanted(2).key
    disk.write(stored(variant(3, start=9, generation=1, prepared_behind=(a, b))))
    disk.write(stored(variant(3)))
    disk.write(stored(variant(4)))
    tiers = open_chunk_tiers()
    idle(tiers)
    key = wanted(3).key
    keys, name = [key, wanted(4).key], variant(3, start=9, generation=1, prepared_behind=(a, b)).name
    assert tiers.stored_lens(dict.fromkeys(keys, name)) == {key: LENGTH}
    for context, expected in (((), False), ((wanted(5).key,), True)):
        found = search(tiers._tiers, wanted(3, context=context))
        assert found.stored is not None
        assert found.stored.info.is_prepared == expected
        assert found.stored.info.context == ((a, b) if expected else ())
    found = search(tiers._tiers, wanted(3, max_generation=0))
    assert found.stored is not None
    assert not found.stored.info.is_prepared


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """Of two ranks that are threads: for each its end of one process group."""
    loopback = torch.distributed.ProcessGroupGloo.create_device(interface="lo")
    store = torch.distributed.HashStore()

    def connect(rank: int) -> Any:
        options = torch.distributed.ProcessGroupGloo._Options()
        options._devices = [loopback]
        options._timeout = datetime.timedelta(seconds=PATIENCE_S)
        return torch.distributed.ProcessGroupGloo(store, rank, 2, options)

    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(connect, range(2)))


# What is known to be stored.


def alone(keys: list[bytes]) -> dict[bytes, str]:
    """Names of the variants that were computed alone, at the start of a prompt."""
    return dict.fromkeys(keys, variant(1).name)


def test_stored_is_what_a_new_request_would_find(open_chunk_tiers, tmp_path):
    medium = DiskMedium(tmp_path / "disk", FINGERPRINT)
    for one in (variant(1), variant(2, generation=1), variant(3)):
        medium.write(stored(one))
    keys = [wanted(number).key for number in range(1, 5)]
    names = alone(keys)
    tiers = open_chunk_tiers(host_bytes=1 << 20)
    idle(tiers)
    assert tiers.stored_lens(names) == {keys[0]: LENGTH, keys[2]: LENGTH}, "of the second another variant is"
    assert tiers.stored_lens({}) == {}
    tiers.note_stored(variant(4))
    idle(tiers)
    assert keys[3] in tiers.stored_lens(names)
    assert [tiers.known(key) for key in keys[:2]] == [{"disk": 1}, {"disk": 1}], "of any variant"
    assert (tiers.known(keys[3]), tiers.known(b"nobody's")) == ({"host": 1, "disk": 1}, {})
    assert tiers.evict([keys[0], keys[1], b"nobody's"]) == {keys[0]: {"disk": 1}, keys[1]: {"disk": 1}}
    assert tiers.evict([keys[3]]) == {keys[3]: {"host": 1, "disk": 1}}
    assert tiers.evict([]) == {}
    assert tiers.stored_lens(names) == {keys[2]: LENGTH}, "also before a worker has deleted them"
    idle(tiers)
    assert on_disk(tmp_path / "disk") == {3}
    tiers.disable("the test says so.")
    assert tiers.stored_lens(names) == tiers.known(keys[2]) == {}


def test_evict_deletes_what_another_server_has_written_meanwhile(open_chunk_tiers, tmp_path):
    tiers = open_chunk_tiers()
    idle(tiers)
    DiskMedium(tmp_path / "disk", FINGERPRINT).write(stored(variant(1)))
    tiers.evict([wanted(1).key])
    idle(tiers)
    assert on_disk(tmp_path / "disk") == set()


def test_what_was_computed_behind_a_chunk_is_deleted_too(open_chunk_tiers, tmp_path):
    first, second, third = wanted(1).key, wanted(2).key, wanted(3).key
    medium = DiskMedium(tmp_path / "disk", FINGERPRINT)
    for number, context in ((1, ()), (2, (first,)), (3, (second,))):
        medium.write(stored(variant(number, context=context)))
    tiers = open_chunk_tiers(host_bytes=100 * SIZE)
    idle(tiers)
    medium.write(stored(variant(4, context=(third, first))))  # by another server, meanwhile
    for number in (5, 6):
        tiers.note_stored(variant(number, context=(first,)))
        if number == 5:
            idle(tiers)  # the other is being written
    tiers.evict_behind({first})
    assert tiers.stats()["tiers"]["host"]["entries"] == 0
    idle(tiers)
    assert on_disk(tmp_path / "disk") == {1, 3}
    tiers.evict_behind({b"nobody's"})
    idle(tiers)
    assert on_disk(tmp_path / "disk") == {1, 3}


def test_a_store_is_asked_what_it_has(open_chunk_tiers, groups, tmp_path):
    """It is not listed at the start; ranks wait for each other's answers."""
    ranks = [open_chunk_tiers(f"rank{rank}", reduce_max=max_over_ranks(groups[rank])) for rank in range(2)]
    for rank, tiers in enumerate(ranks):
        idle(tiers)
        tiers._tiers = (replace(tiers._tiers[0], is_asked=True),)
        for number in (1, 2)[rank:]:  # by others, meanwhile
            DiskMedium(tmp_path / f"rank{rank}", FINGERPRINT).write(stored(variant(number)))
    keys = [wanted(number).key for number in (1, 2, 3)]
    with ThreadPoolExecutor(2) as pool:

        def on_both(call: Callable[[ChunkTiers], Any]) -> list[Any]:
            return list(pool.map(call, ranks))

        assert on_both(lambda tiers: tiers.stored_lens(alone(keys))) == [{}, {}]
        assert on_both(lambda tiers: tiers.ask([], is_first=True)) == [False, False]
        assert on_both(lambda tiers: tiers.ask(keys, is_first=True)) == [True, True]
        idle(ranks[0])
        assert on_both(lambda tiers: tiers.ask(keys, is_first=False)) == [True, True], "one has no answer yet"
        idle(ranks[1])
        assert on_both(lambda tiers: tiers.ask(keys, is_first=False)) == [False, False]
        assert on_both(lambda tiers: tiers.stored_lens(alone(keys))) == [{keys[1]: LENGTH}] * 2, "what both have"


def test_stored_is_what_every_rank_has(open_chunk_tiers, groups, tmp_path):
    for rank, numbers in enumerate(((1, 2), (2, 3))):
        for number in numbers:
            DiskMedium(tmp_path / f"rank{rank}", FINGERPRINT).write(stored(variant(number)))
    ranks = [open_chunk_tiers(f"rank{rank}", reduce_max=max_over_ranks(groups[rank])) for rank in range(2)]
    for tiers in ranks:
        (disk,) = tiers._tiers
        for info in disk.medium.scan():
            tiers._writer.adopt(disk, info.listed)
    keys = [wanted(number).key for number in (1, 2, 3)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda tiers: tiers.stored_lens(alone(keys)), ranks)) == [{keys[1]: LENGTH}] * 2
        assert list(pool.map(lambda tiers: tiers.known(keys[0]), ranks)) == [{"disk": 1}] * 2, "what any has"


# Other weights.


def weights_change(tiers: ChunkTiers) -> None:
    """What every way to change them does to the tiers."""
    tiers.disable("the weights were changed")


def test_kv_of_other_weights_neither_comes_up_nor_goes_down(open_chunk_tiers, tmp_path):
    tiers = open_chunk_tiers(host_bytes=1 << 20)
    for number in (1, 2):
        tiers.note_stored(variant(number))
    idle(tiers)
    assert tiers.stats()["tiers"]["host"]["entries"] == 2
    tiers.want("before", [wanted(1)], num_keys=NUM_KEYS, num_rows=lambda: NUM_KEYS, num_rows_ahead=0)
    tiers.poll(["before"])
    weights_change(tiers)
    assert tiers.bring_in("before") == {}
    assert tiers.stats()["tiers"]["host"]["entries"] == 0
    assert "the weights were changed" in tiers.stats()["disabled"]

    tiers.want("after", [wanted(2)], num_keys=NUM_KEYS, num_rows=lambda: NUM_KEYS, num_rows_ahead=0)
    assert not tiers.is_held("after")
    tiers.poll(["after"])
    assert tiers.bring_in("after") == {}
    assert not tiers._loader._pool.brought
    tiers.note_stored(variant(3))
    tiers.save_victims([variant(4)], LENGTH)
    idle(tiers)
    assert tiers.stats()["tiers"]["host"]["entries"] == 0
    assert on_disk(tmp_path / "disk") == {1, 2}, "of the weights that a new server starts with"


def test_who_waits_while_the_weights_change_waits_no_longer(open_chunk_tiers):
    slow = {"disk": {"bytes_per_s": 1e9, "latency_s": 0.2}}
    tiers = open_chunk_tiers(throttle=slow)
    tiers.note_stored(variant(1))
    idle(tiers)
    tiers.want("r", [wanted(1)], num_keys=NUM_KEYS, num_rows=lambda: NUM_KEYS, num_rows_ahead=0)
    tiers.poll(["r"])
    assert tiers.is_held("r")
    weights_change(tiers)
    assert not tiers.is_held("r")
    idle(tiers)
    tiers.poll(["r"])
    assert tiers.bring_in("r") == {}
    assert tiers.stats()["staged_bytes"] == 0


NOT_READ = (False, "Failed to get weights iterator: no such folder.")
ROLLED_BACK = (False, "Failed to update weights: wrong shape.\nRolling back to original weights.")
LOADED = (True, "Succeeded to update model weights.")


def is_off_after(tiers: ChunkTiers, group: Any, *outcomes: tuple[bool, str]) -> bool:
    """Whether tiers are off after an update from disk; `outcomes` of the target, and of a draft."""

    def worker(outcome: tuple[bool, str], role: str) -> Any:
        loading = SimpleNamespace(update_weights_from_disk=lambda *_, **__: outcome)
        return SimpleNamespace(weight_update_runners=lambda: [(role, SimpleNamespace(weight_updater=loading))])

    updater = ChunkWeightUpdater.__new__(ChunkWeightUpdater)
    chunks = SimpleNamespace(forget_weights=lambda: weights_change(tiers))
    updater.scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(chunks=chunks), record_weight_version_change=lambda new_version: None
    )
    updater.tp_worker = worker(outcomes[0], "target")
    updater.draft_worker = worker(outcomes[1], "draft") if len(outcomes) > 1 else None
    updater.metrics_collector, updater.tp_cpu_group = None, group
    updater.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path="other", flush_cache=False))
    return tiers.stats()["disabled"] is not None


@pytest.mark.parametrize(
    ("ranks", "is_off"),
    [
        ([[NOT_READ], [NOT_READ]], False),
        ([[NOT_READ, LOADED], [NOT_READ, LOADED]], True),  # with a draft nobody says which of them
        ([[LOADED, NOT_READ], [LOADED, NOT_READ]], True),
        ([[ROLLED_BACK], [ROLLED_BACK]], True),
        ([[LOADED], [LOADED]], True),
        ([[LOADED], [NOT_READ]], True),
    ],
)
def test_an_update_that_loaded_nothing_on_any_rank_leaves_the_tiers_on(open_chunk_tiers, groups, ranks, is_off):
    tiers = [open_chunk_tiers(f"rank{rank}") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: is_off_after(tiers[rank], groups[rank], *ranks[rank]), range(2))
        assert list(found) == [is_off, is_off]


def test_every_way_to_change_the_weights_is_known():
    stock = ChunkWeightUpdater.__base__
    ways = {name for name in vars(stock) if name.startswith("update_weights_")}
    assert {*ways, "begin_weight_update", "end_weight_update", "check_weights"} == set(overrides(ChunkWeightUpdater))


# What entries are worth.


def test_what_was_used_often_is_worth_as_much_after_a_restart(
    open_chunk_tiers: Callable[..., ChunkTiers], tmp_path: Path
) -> None:
    disk = DiskMedium(tmp_path / "disk", FINGERPRINT)
    for i in range(4):
        disk.write(stored(variant(i)))
    bounded = {"disk": {"path": str(tmp_path / "disk"), "max_bytes": 100 * SIZE}}
    first = open_chunk_tiers(**bounded)
    idle(first)
    ledger = first._tiers[0].ledger
    order = list(ledger)
    ledger.touch(order[1], 2.5)
    ledger.touch(order[0])
    expected = [(entry_id, ledger.frequency_of(entry_id)) for entry_id in ledger]
    first.close()
    disk.write(stored(variant(4)))
    second = open_chunk_tiers(**bounded)
    idle(second)
    found = [(entry_id, second._tiers[0].ledger.frequency_of(entry_id)) for entry_id in second._tiers[0].ledger]
    assert found[1:] == expected
    assert found[0] == (stored(variant(4)).info.entry_id, 0.0), "what nobody knows anything of goes first"


def test_a_note_that_is_none_is_told_and_all_count_as_unused(
    open_chunk_tiers: Callable[..., ChunkTiers], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskMedium(tmp_path / "disk", FINGERPRINT)
    disk.write(stored(variant(1)))
    disk.write_note(b'[["00", 3]]')
    tiers = open_chunk_tiers()
    idle(tiers)
    assert len(tiers._tiers[0].ledger) == 1
    assert "count as unused" in caplog.text
