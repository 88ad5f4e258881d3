"""TierLoader over real media: what is found, and who waits how long."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
import zlib
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chunk_cache.index.need import Need
from sglang_chunk_cache.host.scheduler import merge
from sglang_chunk_cache.kv import fingerprint as fingerprint_module
from sglang_chunk_cache.kv.fingerprint import FORMAT_VERSION, Fingerprint
from sglang_chunk_cache.kv.layer_stream import LayerStream
from sglang_chunk_cache.tiers import loader as loader_module
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.record import MAGIC, PREFIX, encoded_len
from sglang_chunk_cache.tiers.search import Found
from unit.tiers.medium_suite import FINGERPRINT, assert_same
from unit.tiers.mounting import mount, unmount
from unit.tiers.tier_harness import (
    LENGTH,
    SIZE,
    file_of,
    flip,
    open_tiers,
    result,
    stored,
    variant,
    wanted,
    write,
)

HOST = {"host": 1 << 20}
SLOW = {"disk": (1e9, 0.15)}  # finding and reading take that long each


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
        with open_tiers({"disk": tmp_path}) as tiers:
            (found,) = tiers.load(wanted(1, max_generation=limit))
            assert (found.tier, found.stored is not None) == (tier, bool(tier))


def test_the_variant_that_fits_its_context_best_is_read(tmp_path: Path) -> None:
    medium, (a, b), (s, t) = DiskMedium(tmp_path, FINGERPRINT), (wanted(8).key, wanted(9).key), (b"s" * 8, b"t" * 8)
    for start, context, system in ((0, (), s), (1, (a,), s), (2, (b,), s), (3, (b,), t)):
        medium.write(stored(variant(1, start=start, context=context, system=system)))
    needs = [((), s), ((a,), s), ((b,), s), ((b,), t)]
    with open_tiers({"disk": tmp_path}) as tiers:
        for start, (context, system) in enumerate(needs):
            need = Need(3, context, system)
            (found,) = tiers.load(replace(wanted(1), need=need), rid=f"r{start}")
            assert found.stored is not None
            assert found.stored.info.start == start
            tiers.pool.brought.clear()
        ledger = tiers.tier("disk").ledger
        assert [ledger.frequency_of(entry_id) for entry_id in ledger] == [LENGTH] * 4, "uses that cost nothing"
        apart = Need(3, (a,), t, is_system_fixed=True, max_unit_cfo=0.5)
        (found,) = tiers.load(replace(wanted(1), need=apart), rid="apart")
        assert found.stored is None, "the only one behind that system prompt costs too much"


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


def test_a_stream_that_all_ranks_gave_up_is_not_brought_in_again(tmp_path: Path) -> None:
    """Else its request would wait for room for it for ever."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.want("r", wanted(1))
        tiers.settle("r")
        found = tiers.loader._waiting["r"].outcome[wanted(1).key]
        assert found.stored is not None
        stream = LayerStream(found.stored, iter(()), "disk")
        stream.fail("corrupt")
        tiers.loader._waiting["r"].outcome[wanted(1).key] = replace(found, stream=stream)
        tiers.pool.brought.clear()
        assert result(tiers.loader.bring_in("r")[wanted(1).key]) == ("disk", None), "others may still read it"
        stream.is_given_up = True
        assert result(tiers.loader.bring_in("r")[wanted(1).key]) == ("disk", "tier_corrupt")


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


def test_all_variants_that_a_search_sees_are_known_from_then_on(tmp_path: Path) -> None:
    """So no more of a chunk are kept than there may be, whoever wrote them."""
    for start in (0, 9):
        write(tmp_path, 1, start=start)
    with open_tiers({"disk": tmp_path}) as tiers:
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", None)]
        tiers.check()
        assert len(tiers.tier("disk").ledger) == 2
        tiers.writer.note_stored(variant(1, start=5))
        tiers.check()
        assert len(tiers.tier("disk").ledger) == 2


# Faults.


def test_damaged_is_forgotten_and_the_next_tier_asked(tmp_path: Path) -> None:
    folders = {"disk": tmp_path / "disk", "remote": tmp_path / "remote"}
    write(folders["disk"], 1, 2)
    write(folders["remote"], 2)
    with open_tiers(folders) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
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
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
        path = file_of(tmp_path, 1)
        path.write_bytes(path.read_bytes()[:50])
        assert [result(one) for one in tiers.load(wanted(1), wanted(2))] == [("disk", "tier_corrupt"), ("", None)]
        tiers.check()
        assert not len(tiers.tier("disk").ledger)


@pytest.mark.parametrize(
    "change", [{"start": 3}, {"context": "x"}, {"place": "\ud800"}, {"generation": 1e999}, {"statistics": {"inter": 1}}]
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
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
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


@pytest.mark.parametrize(
    ("loading", "where", "allocation"),
    [
        ("prefetch", fingerprint_module, "host_buffer"),
        ("layerwise", fingerprint_module, "host_buffer"),
        ("layerwise", Fingerprint, "empty_layer"),
    ],
)
def test_where_host_memory_is_used_up_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: str, where: Any, allocation: str
) -> None:
    def used_up(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, loading=loading) as tiers:
        with monkeypatch.context() as patch:
            patch.setattr(where, allocation, used_up)
            assert result(tiers.load(wanted(1))[0]) == ("disk", "tier_full")
            tiers.check_nothing_waits()
        assert tiers.counted == [("disk", "tier_full")]
        assert result(tiers.load(wanted(1))[0]) == ("disk", None), "it is still stored"


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


def test_a_request_that_is_aborted_and_comes_again_while_its_load_waits(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, num_threads=1) as tiers:
        free = threading.Event()
        tiers.workers.submit(free.wait, lambda _: None)  # the load stands behind it
        tiers.want("gone", wanted(1))
        tiers.loader.poll([])
        free.set()
        while tiers.workers._done.qsize() != 2:  # the worker has found that nobody wants the chunk
            time.sleep(0.001)
        tiers.want("again", wanted(1))
        tiers.settle("again")
        assert result(tiers.loader.bring_in("again")[wanted(1).key]) == ("disk", None)
        tiers.loader.poll([])
        tiers.check_nothing_waits()


def test_a_load_that_ends_beside_who_does_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, num_threads=1) as tiers:
        free = threading.Event()
        tiers.workers.submit(free.wait, lambda _: None)  # the load stands behind it
        for rid in ("gone", "gone too"):
            tiers.want(rid, wanted(1))
            tiers.loader.poll([])
        free.set()
        while tiers.workers._done.qsize() != 2:  # the worker has found that nobody wants the chunk
            time.sleep(0.001)
        in_memory = Found(stored(variant(1)), "host")
        monkeypatch.setattr(tiers.loader._search, "run_in_memory", lambda _: in_memory)
        tiers.want("finds it there", wanted(1))
        tiers.settle("finds it there")
        assert result(tiers.loader.bring_in("finds it there")[wanted(1).key]) == ("host", None)
        tiers.loader.poll([])
        tiers.check_nothing_waits()


def test_what_is_deleted_while_it_is_read_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, slow=SLOW) as tiers:
        tiers.want("early", wanted(1))
        tiers.step("early")
        file_of(tmp_path, 1).unlink()
        tiers.loader.note_deletion()
        assert not tiers.loader.is_held("early")
        assert tiers.loader.bring_in("early") == {}
        tiers.want("late", wanted(1))  # the read goes on
        tiers.settle("late")
        assert tiers.loader.bring_in("late")[wanted(1).key].stored is None
        tiers.loader.poll([])
        tiers.check_nothing_waits()
    assert not tiers.pool.brought


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
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
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


def test_a_stream_that_ends_after_a_deletion_is_not_written_to_host_memory(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with open_tiers({"disk": tmp_path}, limits={"host": 1 << 20}, loading="layerwise", num_threads=1) as tiers:
        tiers.want("r", wanted(0))
        tiers.settle("r")
        (found,) = tiers.loader.bring_in("r").values()
        assert found.stream is not None
        tiers.loader.poll([])  # it was admitted, and its forward reads the stream
        assert found.stream.wait(found.stream.num_layers - 1, 2.0)
        tiers.loader.note_deletion()
        tiers.idle()
        assert not list(tiers.tier("host").medium.scan())
