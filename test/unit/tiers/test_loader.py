"""TierLoader over real media: what is found, who waits how long, and what two ranks agree on."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chunk_cache.chunk_statistics import ChunkStatistics
from sglang_chunk_cache.host.scheduler import merge
from sglang_chunk_cache.tiers import loader as loader_module
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.fingerprint import FORMAT_VERSION
from sglang_chunk_cache.tiers.record import MAGIC, PREFIX, encoded_len
from sglang_chunk_cache.tiers.search import Found
from unit.tiers.medium_suite import FINGERPRINT, assert_same
from unit.tiers.mounting import mount, unmount
from unit.tiers.tier_harness import PATIENCE_S, SIZE, Ranks, Tiers, open_tiers, stored, variant, wanted

HOST = {"host": 1 << 20}
SLOW = {"disk": (1e9, 0.15)}  # finding and reading take that long each


def write(folder: Path, *numbers: int, start: int = 0) -> None:
    """As another server would."""
    for number in numbers:
        DiskMedium(folder, FINGERPRINT).write(stored(variant(number, start=start)))


def file_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"*/*/{wanted(number).key.hex()}/*.kv")
    return path


def flip(path: Path) -> None:
    """A byte of the KV, which is at the end."""
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def result(found: Found) -> tuple[str, str | None]:
    return found.tier, found.reason


# What is found.


def test_from_disk_bit_by_bit(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        (found,) = tiers.load(wanted(1))
        assert result(found) == ("disk", None)
        assert_same(tiers.pool.brought[wanted(1).key], stored(variant(1)))
        assert tiers.counted == [("disk", "ok")]
        tiers.check_nothing_waits()
        tiers.check()


def test_what_no_tier_has(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}, limits=HOST) as tiers:
        (found,) = tiers.load(wanted(1))
        assert (result(found), found.stored) == (("", None), None)
        assert tiers.counted == [("none", "not_stored")]
        assert not tiers.pool.brought


def test_the_host_tier_has_it_afterwards(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, limits=HOST) as tiers:
        tiers.load(wanted(1))
        tiers.idle()
        shutil.rmtree(tmp_path)
        tiers.pool.brought.clear()
        tiers.want("again", wanted(1))
        tiers.loader.poll(["again"])  # memory: there is nothing to wait for
        assert not tiers.loader.is_held("again")
        assert result(tiers.loader.bring_in("again")[wanted(1).key]) == ("host", None)
        assert_same(tiers.pool.brought[wanted(1).key], stored(variant(1)))


def test_the_first_tier_that_has_it_is_asked(tmp_path: Path) -> None:
    folders = {"disk": tmp_path / "disk", "remote": tmp_path / "remote"}
    write(folders["remote"], 1, 2)
    write(folders["disk"], 2)
    with open_tiers(folders) as tiers:
        assert [result(found) for found in tiers.load(wanted(1), wanted(2))] == [("remote", None), ("disk", None)]


def test_what_was_written_by_others_counts_from_then_on(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        assert not len(tiers.tier("disk").ledger)
        tiers.load(wanted(1))
        tiers.check()
        assert len(tiers.tier("disk").ledger) == 1


def test_a_variant_of_too_many_generations_is_not_used(tmp_path: Path) -> None:
    medium = DiskMedium(tmp_path, FINGERPRINT)
    medium.write(stored(variant(1, generation=2)))
    for limit, tier in ((1, ""), (2, "disk")):
        with open_tiers({"disk": tmp_path}, max_generation=limit) as tiers:
            (found,) = tiers.load(wanted(1))
            assert (found.tier, found.stored is not None) == (tier, bool(tier))


def test_what_the_pool_has_by_now_is_not_brought_in_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        for rid in "ab":
            tiers.want(rid, wanted(1))
        tiers.settle("a", "b")
        for rid in "aab":  # admission may be tried several times
            assert result(tiers.loader.bring_in(rid)[wanted(1).key]) == ("disk", None)
        assert len(tiers.pool.brought) == 1, "the pool asserts that it comes once"


def test_a_pool_without_room(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.pool.has_room = False
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", "memory")]


def test_a_request_without_chunks_is_not_held(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.want("r")
        tiers.loader.poll(["r"])
        assert not tiers.loader.is_held("r")
        assert tiers.loader.bring_in("r") == {}
        assert tiers.loader.bring_in("nobody") == {}


def test_the_same_chunk_twice_in_a_prompt(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        assert [result(found) for found in tiers.load(wanted(1), wanted(1))] == [("disk", None)] * 2
        assert tiers.counted == [("disk", "ok")]


# Faults.


def test_damaged_is_forgotten_and_the_next_tier_asked(tmp_path: Path) -> None:
    folders = {"disk": tmp_path / "disk", "remote": tmp_path / "remote"}
    write(folders["disk"], 1, 2)
    write(folders["remote"], 2)
    with open_tiers(folders) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        for number in (1, 2):
            flip(file_of(folders["disk"], number))
        found = tiers.load(wanted(1), wanted(2))
        assert [result(one) for one in found] == [("disk", "tier_corrupt"), ("remote", None)]
        assert ("disk", "tier_corrupt") in tiers.counted
        tiers.check()
        assert not len(tiers.tier("disk").ledger)
        tiers.writer.note_stored(variant(1))
        tiers.idle()
        assert [result(one) for one in tiers.load(wanted(1))] == [("disk", None)]


def test_a_damaged_description_is_told_as_well(tmp_path: Path) -> None:
    """The medium skips it when it looks, so there is nothing to read."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, num_threads=1) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        path = file_of(tmp_path, 1)
        path.write_bytes(path.read_bytes()[:50])
        assert [result(one) for one in tiers.load(wanted(1), wanted(2))] == [("disk", "tier_corrupt"), ("", None)]
        tiers.check()
        assert not len(tiers.tier("disk").ledger)


@pytest.mark.parametrize(
    "change", [{"start": 3}, {"context": "x"}, {"generation": 1e999}, {"statistics": {"inter": 1}}]
)
def test_a_description_that_was_made_on_purpose(tmp_path: Path, change: dict[str, Any]) -> None:
    """Its checksum is right. It costs the chunk, and nobody else anything."""
    write(tmp_path, 1, 2)
    path = file_of(tmp_path, 1)
    raw = path.read_bytes()
    header_len = encoded_len(raw, "")
    text = json.dumps(json.loads(raw[PREFIX.size : header_len]) | change).encode()
    lens = struct.pack("<II", FORMAT_VERSION, len(text))
    path.write_bytes(MAGIC + lens + struct.pack("<I", zlib.crc32(lens + text)) + text + raw[header_len:])
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        found = tiers.load(wanted(1), wanted(2))
        assert [result(one) for one in found] == [("disk", "tier_corrupt"), ("disk", None)]
        assert not path.exists()
        tiers.check()


def test_what_cannot_be_read_now_is_not_deleted(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.writer.note_stored(variant(1))
        tiers.idle()
        path = file_of(tmp_path, 1)
        if not mount("--bind", "/proc/1/mem", str(path)):  # reading its first byte fails, for root too
            pytest.skip("files cannot be covered here (needs root)")
        try:
            for _ in range(3):  # told each time, also where the log has it already
                assert [result(one) for one in tiers.load(wanted(1))] == [("disk", "tier_unreadable")]
                tiers.idle()
        finally:
            unmount(str(path))
        assert [result(one) for one in tiers.load(wanted(1))] == [("disk", None)]


def test_the_other_variant_is_used_where_one_is_damaged(tmp_path: Path) -> None:
    medium = DiskMedium(tmp_path, FINGERPRINT)
    for start in (0, 3):
        medium.write(stored(variant(1, start=start)))
    first = medium.find(wanted(1).key)[0]
    flip(tmp_path / FINGERPRINT.digest / first.key.hex()[:2] / first.key.hex() / f"{first.name}.kv")
    with open_tiers({"disk": tmp_path}) as tiers:
        (found,) = tiers.load(wanted(1))
        assert result(found) == ("disk", None)
        assert found.stored is not None
        assert found.stored.info.start != first.start
        tiers.check()


def test_other_tokens_under_the_same_key_are_never_used(tmp_path: Path) -> None:
    one = stored(variant(1))
    tokens = array("q", [int(token) + 1 for token in one.info.token_ids])
    other = replace(one, info=replace(one.info, token_ids=tokens))
    DiskMedium(tmp_path, FINGERPRINT).write(other)
    with open_tiers({"disk": tmp_path}) as tiers:
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", "tier_mismatch")]
        assert not tiers.pool.brought
        tiers.check()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path / "root"}, limits=HOST) as tiers:
        shutil.rmtree(tmp_path / "root")
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", "tier_unavailable")]
        (tmp_path / "root").mkdir()
        write(tmp_path / "root", 1)
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", None)]


def test_deleted_behind_our_back(tmp_path: Path) -> None:
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.writer.note_stored(variant(1))
        tiers.idle()
        file_of(tmp_path, 1).unlink()
        (found,) = tiers.load(wanted(1))
        assert found.stored is None
        tiers.check()
        tiers.writer.note_stored(variant(1))
        tiers.check()
        assert [result(one) for one in tiers.load(wanted(1))] == [("disk", None)]


def test_what_is_written_while_it_is_looked_for_stays(tmp_path: Path) -> None:
    """A slow tier is still being searched when the chunk is computed and written to a fast one."""
    folders = {"disk": tmp_path / "disk", "remote": tmp_path / "remote"}
    with open_tiers(folders, slow={"remote": (1e9, 0.3)}, num_threads=3) as tiers:
        tiers.want("r", wanted(1))
        time.sleep(0.1)
        tiers.writer.note_stored(variant(1))
        tiers.settle("r")
        tiers.idle()
        assert file_of(folders["disk"], 1).exists()


# Who waits.


def test_one_load_serves_all_who_want_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow=SLOW) as tiers:
        for rid in "abc":
            tiers.want(rid, wanted(1))
        tiers.settle("a", "b", "c")
        assert [result(tiers.loader.bring_in(rid)[wanted(1).key]) for rid in "abc"] == [("disk", None)] * 3
        assert tiers.tier("disk").ledger.stats()["hits"] == 1
        tiers.check_nothing_waits()


def test_a_request_is_held_until_its_last_load_has_ended(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    with open_tiers({"disk": tmp_path}, slow=SLOW, num_threads=1) as tiers:
        tiers.want("one", wanted(1))
        tiers.want("both", wanted(1), wanted(2))
        tiers.settle("one", queued=["one", "both"])
        assert tiers.loader.is_held("both")
        assert tiers.loader.bring_in("both") == {}, "not before it is admitted"
        tiers.settle("both", queued=["one", "both"])
        assert {result(found) for found in tiers.loader.bring_in("both").values()} == {("disk", None)}


def test_abort_while_loading(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    with open_tiers({"disk": tmp_path}, slow=SLOW) as tiers:
        tiers.want("gone", wanted(1), wanted(2))
        tiers.want("stays", wanted(2))
        tiers.loader.poll(["stays"])
        assert not tiers.loader.is_held("gone")
        assert tiers.loader.bring_in("gone") == {}
        tiers.settle("stays")
        assert result(tiers.loader.bring_in("stays")[wanted(2).key]) == ("disk", None)
        tiers.check_nothing_waits()
        tiers.want("gone", wanted(1))  # the same id comes again
        tiers.settle("gone")
        assert result(tiers.loader.bring_in("gone")[wanted(1).key]) == ("disk", None)
        tiers.check_nothing_waits()


def test_nobody_waits_after_clear(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow=SLOW) as tiers:
        tiers.want("r", wanted(1))
        tiers.loader.clear()
        assert tiers.loader.num_held == 0
        tiers.check_nothing_waits()


def test_too_late(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.5)}, timeout_s=0.1) as tiers:
        began = time.monotonic()
        (found,) = tiers.load(wanted(1))
        assert found.reason == "tier_timeout"
        assert time.monotonic() - began < 0.45
        assert ("none", "tier_timeout") in tiers.counted
        tiers.check_nothing_waits()
        assert not tiers.pool.brought


def test_loads_that_never_began_leave_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path, *range(20))
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.02)}, timeout_s=0.05, num_threads=1) as tiers:
        found = tiers.load(*(wanted(i) for i in range(20)))
        assert "tier_timeout" in {one.reason for one in found}
        tiers.check_nothing_waits()


def test_sync_loads_before_it_returns(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow=SLOW, loading="sync") as tiers:
        began = time.monotonic()
        tiers.want("r", wanted(1))
        assert time.monotonic() - began > 0.25
        tiers.loader.poll(["r"])
        assert not tiers.loader.is_held("r")
        assert result(tiers.loader.bring_in("r")[wanted(1).key]) == ("disk", None)


def test_sync_gives_up_too(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.6)}, loading="sync", timeout_s=0.1) as tiers:
        began = time.monotonic()
        assert [found.reason for found in tiers.load(wanted(1))] == ["tier_timeout"]
        assert time.monotonic() - began < 0.5


def test_requests_that_are_passed_over_keep_their_place() -> None:
    """`_merge` puts those that were not seen back between those that were, whoever has left or come."""
    reqs = {name: SimpleNamespace(rid=name) for name in "abcdefg"}

    def merged(before: str, after: str, held: str) -> str:
        found = merge([reqs[r] for r in before], [reqs[r] for r in after], {id(reqs[r]) for r in held})  # type: ignore[misc]
        return "".join(req.rid for req in found)

    assert merged("abcde", "ace", "bd") == "abcde"
    assert merged("abcde", "ce", "bd") == "bcde", "a was admitted"
    assert merged("abcde", "", "bd") == "bd"
    assert merged("abcde", "eca", "bd") == "ebcda", "SGLang has sorted the others"
    assert merged("abcde", "acefg", "bd") == "abcdefg", "some came meanwhile"
    assert merged("ab", "", "ab") == "ab"


# Load or compute.


def learned(tiers: Tiers, load_s: float, s_per_row: float) -> None:
    """As if a chunk of `LENGTH` tokens took so long, and computing a row."""
    for i in range(40):
        tiers.tier("disk").reads.observe(SIZE * (1 + i % 3), load_s * (1 + i % 3))
        rows = 50 * (1 + i % 4)
        tiers.prefill_cost.observe(rows, rows, s_per_row * rows)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Tiers]:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        yield tiers


def test_what_is_computed_sooner_is_not_loaded(controlled: Tiers) -> None:
    learned(controlled, load_s=1.0, s_per_row=1e-5)
    assert [result(found) for found in controlled.load(wanted(1))] == [("disk", "tier_slow")]
    assert ("disk", "tier_slow") in controlled.counted
    assert controlled.tier("disk").ledger.stats()["hits"] == 0
    assert controlled.tier("disk").ledger.contains(stored(variant(1)).info.entry_id), "it stays"


def test_what_is_loaded_sooner_is_loaded(controlled: Tiers) -> None:
    learned(controlled, load_s=1e-4, s_per_row=1e-2)
    assert [result(found) for found in controlled.load(wanted(1))] == [("disk", None)]
    assert controlled.loader.estimates.num == 1


def test_a_load_hides_behind_the_queue(controlled: Tiers) -> None:
    learned(controlled, load_s=1.0, s_per_row=1e-3)
    controlled.want("r", wanted(1), num_rows_ahead=5000)
    controlled.settle("r")
    assert result(controlled.loader.bring_in("r")[wanted(1).key]) == ("disk", None)


def test_what_nobody_knew_of_is_loaded(tmp_path: Path) -> None:
    """Another server has written it: there is nothing to estimate with."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        learned(tiers, load_s=1.0, s_per_row=1e-5)
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", None)]


def test_layerwise_loads_hide_behind_the_forward(tmp_path: Path) -> None:
    """Each chunk is computed in 0.05 s and loaded in 0.1 s. Computing the first hides half of loading the second."""
    write(tmp_path, 1, 2)
    outcomes = {}
    for loading in ("prefetch", "layerwise"):
        with open_tiers({"disk": tmp_path}, controller=True, loading=loading) as tiers:
            for number in (1, 2):
                tiers.writer.adopt(tiers.tier("disk"), stored(variant(number)).info)
            learned(tiers, load_s=0.1, s_per_row=0.01)
            outcomes[loading] = [result(found) for found in tiers.load(wanted(1), wanted(2))]
    assert outcomes["prefetch"] == [("disk", "tier_slow"), ("disk", "tier_slow")]
    assert outcomes["layerwise"] == [("disk", "tier_slow"), ("disk", None)]


@pytest.mark.parametrize(("loading", "reason"), [("prefetch", "tier_slow"), ("layerwise", None)])
def test_layerwise_loads_hide_behind_rows_that_are_computed_again(
    tmp_path: Path, loading: str, reason: str | None
) -> None:
    """A chunk is computed in 1 s; of 100 tokens that are loaded, 15 are computed again, in 0.15 s."""
    chunk, one = wanted(1, length=100), variant(1, length=100)
    DiskMedium(tmp_path, FINGERPRINT).write(stored(one))
    with open_tiers({"disk": tmp_path}, controller=True, loading=loading) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(one).info)
        learned(tiers, load_s=1.07 / 20, s_per_row=0.01)
        assert [result(found) for found in tiers.load(chunk)] == [("disk", reason)]


def test_patience_is_what_the_load_is_worth(tmp_path: Path) -> None:
    """A load that was estimated to be quick is not waited for until the timeout."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True, slow={"disk": (1e9, 1.0)}, timeout_s=30.0) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        learned(tiers, load_s=1e-4, s_per_row=1e-3)
        began = time.monotonic()
        assert [found.reason for found in tiers.load(wanted(1))] == ["tier_timeout"]
        assert time.monotonic() - began < 0.9


def test_one_request_finds_it_slow_and_another_has_loaded_it(tmp_path: Path) -> None:
    """Each gets what was decided for it, also where both are settled in the same step."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        learned(tiers, load_s=1.0, s_per_row=1e-3)
        tiers.want("alone", wanted(1))
        tiers.want("behind", wanted(1), num_rows_ahead=5000)
        tiers.idle()
        tiers.settle("alone", "behind")
        found = {rid: tiers.loader.bring_in(rid)[wanted(1).key] for rid in ("alone", "behind")}
        assert result(found["alone"]) == ("disk", "tier_slow")
        assert result(found["behind"]) == ("disk", None)


# Two ranks.


class Pair:
    """Two ranks, each with a folder of its own, that take the same steps."""

    def __init__(self, stack: ExitStack, root: Path, slow: tuple[Any, Any] = (None, None), **config: Any) -> None:
        ranks = Ranks()
        self.folders = (root / "rank0", root / "rank1")
        self.ranks = tuple(
            stack.enter_context(
                open_tiers({"disk": folder}, slow=slow[rank], reduce_max=ranks.reduce_of(rank), **config)
            )
            for rank, folder in enumerate(self.folders)
        )
        self._threads = stack.enter_context(ThreadPoolExecutor(2))

    def both(self, do: Callable[[Tiers], Any]) -> list[Any]:
        """Both at the same time."""
        running = [self._threads.submit(do, tiers) for tiers in self.ranks]
        return [one.result(timeout=3 * PATIENCE_S) for one in running]

    def load(self, *numbers: int) -> list[list[tuple[str, str | None]]]:
        """For each rank: what has become of the chunks."""
        return self.both(lambda tiers: [result(found) for found in tiers.load(*map(wanted, numbers))])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path)


def test_both_ranks_found_the_same(pair: Pair) -> None:
    for folder in pair.folders:
        write(folder, 1)
    assert pair.load(1, 2) == [[("disk", None), ("", None)]] * 2


def test_what_one_rank_lacks_no_rank_uses(pair: Pair) -> None:
    write(pair.folders[0], 1, 2)
    write(pair.folders[1], 2, 3)
    assert pair.load(1, 2, 3) == [
        [("disk", "tier_ranks"), ("disk", None), ("", "tier_ranks")],
        [("", "tier_ranks"), ("disk", None), ("disk", "tier_ranks")],
    ]
    assert all(set(tiers.pool.brought) == {wanted(2).key} for tiers in pair.ranks)


def test_what_is_damaged_on_one_rank_no_rank_uses(pair: Pair) -> None:
    for folder in pair.folders:
        write(folder, 1)
    flip(file_of(pair.folders[1], 1))
    assert pair.load(1) == [[("disk", "tier_ranks")], [("disk", "tier_corrupt")]]
    assert not any(tiers.pool.brought for tiers in pair.ranks)


def test_ranks_with_different_variants_use_none(pair: Pair) -> None:
    for rank, folder in enumerate(pair.folders):
        write(folder, 1, start=rank)
    assert pair.load(1) == [[("disk", "tier_ranks")]] * 2
    assert not any(tiers.pool.brought for tiers in pair.ranks)


def test_ranks_agree_again_once_the_chunk_was_computed(pair: Pair) -> None:
    """Rank 0 keeps a variant that rank 1 has lost, and may find it first: it forgets it, all write a new one."""
    for folder in pair.folders:
        write(folder, 1)
    for start in range(3, 9):
        for path in pair.folders[1].glob("*/*/*/*.kv"):
            path.unlink()
        assert pair.load(1) == [[("disk", "tier_ranks")], [("", "tier_ranks")]]
        pair.both(lambda tiers, start=start: (tiers.writer.note_stored(variant(1, start=start)), tiers.idle()))
        assert pair.load(1) == [[("disk", None)]] * 2, f"start {start}"
        for tiers in pair.ranks:
            tiers.check()
            tiers.pool.brought.clear()


def test_what_is_late_on_one_rank_is_not_forgotten_on_the_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, slow=(None, {"disk": (1e9, 0.2)}), timeout_s=0.1)
        for folder in pair.folders:
            write(folder, 1)
        pair.load(1)
        for tiers, folder in zip(pair.ranks, pair.folders, strict=True):
            tiers.idle()
            assert file_of(folder, 1).exists()


def test_a_slow_rank_makes_both_wait(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, slow=(None, SLOW))
        for folder in pair.folders:
            write(folder, 1)
        began = time.monotonic()
        assert pair.load(1) == [[("disk", None)]] * 2
        assert time.monotonic() - began > 0.25


def test_a_rank_that_is_late_makes_both_late(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, slow=(None, {"disk": (1e9, 0.5)}), timeout_s=0.1)
        for folder in pair.folders:
            write(folder, 1)
        assert pair.load(1) == [[("disk", "tier_ranks")], [("", "tier_timeout")]]
        assert not any(tiers.pool.brought for tiers in pair.ranks)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_take_the_same_steps_whatever_happens(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    slow = ({"disk": (1e9, 0.002)}, {"disk": (1e9, 0.006)})
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, slow=slow, timeout_s=0.05, limits={"host": 4 * SIZE, "disk": 12 * SIZE})
        for number in range(10):
            for folder in pair.folders:
                if rng.random() < 0.7:
                    write(folder, number, start=rng.choice([0, 0, 0, 1]))
        queue: list[str] = []
        for step in range(120):
            if rng.random() < 0.5:
                chunks = [wanted(rng.randrange(10)) for _ in range(rng.randrange(4))]
                queue.append(f"r{step}")
                pair.both(lambda tiers, chunks=chunks: tiers.want(queue[-1], *chunks))
            if queue and rng.random() < 0.15:
                queue.pop(rng.randrange(len(queue)))  # aborted
            pair.both(lambda tiers: tiers.step(*queue))
            held = pair.both(lambda tiers: [tiers.loader.is_held(rid) for rid in queue])
            assert held[0] == held[1]
            ready = [rid for rid, is_held in zip(queue, held[0], strict=True) if not is_held]
            for rid in ready:
                mine, theirs = pair.both(lambda tiers, rid=rid: dict(tiers.loader.bring_in(rid)))
                used = [{key: f.stored.info for key, f in found.items() if f.stored} for found in (mine, theirs)]
                assert used[0] == used[1], "ranks use the same variants or none"
                queue.remove(rid)
            if rng.random() < 0.2:
                one = variant(rng.randrange(10))
                pair.both(lambda tiers, one=one: tiers.writer.note_stored(one))
            if rng.random() < 0.1:
                pair.both(lambda tiers: tiers.pool.brought.clear())
        queue.clear()
        pair.both(lambda tiers: tiers.loader.poll(()))
        for tiers in pair.ranks:
            tiers.check_nothing_waits()
            for tier in tiers.tiers:
                tier.ledger.check_integrity()
                assert tier.ledger.num_bytes <= (tier.ledger.max_bytes or 0)


# What waiting requests keep.


def test_no_more_is_loaded_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait keep their chunks in memory: no more than some are loaded at the same time."""
    monkeypatch.setattr(loader_module, "MAX_STAGED_BYTES", 2 * SIZE)
    write(tmp_path, *range(6))
    with open_tiers({"disk": tmp_path}, slow=SLOW, num_threads=6) as tiers:
        rids = [f"r{number}" for number in range(6)]
        for number, rid in enumerate(rids):
            tiers.want(rid, wanted(number))
        assert tiers.loader.num_staged_bytes == 2 * SIZE
        while rids:
            tiers.settle(rids[0], queued=rids)
            (found,) = tiers.loader.bring_in(rids.pop(0)).values()
            assert result(found) == ("disk", None)
        tiers.check_nothing_waits()


def test_a_request_may_want_more_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "MAX_STAGED_BYTES", 2 * SIZE)
    write(tmp_path, *range(6))
    with open_tiers({"disk": tmp_path}) as tiers:
        assert [result(found) for found in tiers.load(*map(wanted, range(6)))] == [("disk", None)] * 6
        tiers.check_nothing_waits()


@pytest.mark.parametrize("loading", ["prefetch", "layerwise"])
def test_nothing_is_kept_of_what_was_computed_instead(tmp_path: Path, loading: str) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True, loading=loading) as tiers:
        for _ in range(10):
            tiers.tier("disk").reads.observe(SIZE, 100.0)
            tiers.prefill_cost.observe(100, 100, 1e-6)
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info)
        assert result(tiers.load(wanted(1))[0]) == ("disk", "tier_slow")
        tiers.check_nothing_waits()


def test_a_stream_does_not_wait_behind_the_loads_of_others(tmp_path: Path) -> None:
    """A forward waits for it, while nothing new begins: the scheduler's thread is in that forward."""
    write(tmp_path, *range(8))
    with open_tiers({"disk": tmp_path}, slow={"disk": (1e9, 0.3)}, loading="layerwise", num_threads=1) as tiers:
        tiers.want("first", wanted(0))
        tiers.settle("first")
        for number in range(1, 8):
            tiers.want(f"r{number}", wanted(number))
        (found,) = tiers.loader.bring_in("first").values()
        assert found.stream is not None
        assert all(found.stream.wait(layer, 2.0) for layer in range(found.stream.num_layers))
        assert_same(found.stream.stored, stored(variant(0)))


def test_ranks_with_other_statistics_of_the_same_variant_use_none(pair: Pair) -> None:
    """Rows are chosen by them, and every rank must compute the same rows."""
    for rank, folder in enumerate(pair.folders):
        one = stored(variant(1))
        values = np.full(len(one.info.token_ids), rank, dtype=np.float32)
        statistics = ChunkStatistics(values, values, np.zeros(len(one.info.context), dtype=np.float32))
        one = replace(one, info=replace(one.info, statistics=statistics))
        DiskMedium(folder, FINGERPRINT).write(one)
    assert pair.load(1) == [[("disk", "tier_ranks")]] * 2
