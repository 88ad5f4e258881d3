"""A better variant in a lower tier is seen although an upper one, or the pool, holds another that would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chunk_cache.index.need import Need
from chunk_cache.tiers.variant_search import NOTHING_HELD, Held
from sglang_chunk_cache.tiers import loader as loader_module
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.search import Wanted
from unit.tiers.medium_suite import FINGERPRINT
from unit.tiers.tier_harness import SIZE, Tiers, open_tiers, result, stored, variant, wanted

A, B = wanted(8).key, wanted(9).key
HERE = variant(1, start=5, context=(A,))
ELSEWHERE = variant(1, start=9, context=(B,), generation=1)


def needed(held: Held = NOTHING_HELD) -> Wanted:
    """The chunk, behind A."""
    chunk = wanted(1)
    return Wanted(chunk.key, chunk.token_ids, chunk.partition, Need(3, (A,)), held)


def held(*names: str, share: float = 1.0, worst_rank: Any = None) -> Held:
    return Held(share, 1, has_prepared=False, names=frozenset(names), worst_rank=worst_rank)


def opened(folder: Path, *, in_host: bool = True, **options: Any) -> Any:
    """The disk has it as computed behind A; host memory as derived behind B."""
    DiskMedium(folder, FINGERPRINT).write(stored(HERE))
    return open_tiers({"disk": folder}, limits={"host": 1 << 20} if in_host else {}, **options)


def fill(tiers: Tiers, *, load_s: float | None = None) -> None:
    disk = tiers.tier("disk")
    tiers.writer.adopt(disk, stored(HERE).info.listed)
    if len(tiers.tiers) > 1:
        host = tiers.tier("host")
        host.medium.write(stored(ELSEWHERE))
        tiers.writer.adopt(host, stored(ELSEWHERE).info.listed)
    for i in range(40 if load_s is not None else 0):
        assert load_s is not None
        disk.reads.observe(SIZE * (1 + i % 3), load_s * (1 + i % 3))
        rows = 50 * (1 + i % 4)
        tiers.prefill_cost.observe(rows, rows, float(rows))


@pytest.fixture(params=["prefetch", "layerwise"])
def loading(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("load_s", "tier"), [(None, "disk"), (1e-3, "disk"), (100.0, "host")])
def test_below_host_memory(tmp_path: Path, loading: str, load_s: float | None, tier: str) -> None:
    """Computing the chunk takes 5 s, and from host memory all of it would have to be fixed."""
    with opened(tmp_path, controller=load_s is not None, loading=loading) as tiers:
        fill(tiers, load_s=load_s)
        (found,) = tiers.load(needed())
        assert result(found) == (tier, None)
        assert found.stored is not None
        assert found.stored.info.context == ((A,) if tier == "disk" else (B,))


@pytest.mark.parametrize(("load_s", "tier"), [(None, "disk"), (1e-3, "disk"), (100.0, None)])
def test_below_the_pool(tmp_path: Path, loading: str, load_s: float | None, tier: str | None) -> None:
    with opened(tmp_path, in_host=False, controller=load_s is not None, loading=loading) as tiers:
        fill(tiers, load_s=load_s)
        tiers.want("r", needed(held(ELSEWHERE.name)))
        assert tiers.loader.is_held("r") == (tier is not None), "nobody waits for what is worth less than its load"
        tiers.settle("r")
        found = tiers.loader.bring_in("r")
        assert {key: result(one) for key, one in found.items()} == ({needed().key: (tier, None)} if tier else {})
        assert (needed().key in tiers.pool.brought) == (tier is not None)
        tiers.check_nothing_waits()


@pytest.mark.parametrize(
    "held",
    [held(HERE.name), held(share=0.0), held(worst_rank=(-1, True))],
    ids=["it is in the pool", "the pool's fits perfectly", "the pool has no place for it"],
)
def test_what_is_of_no_use_is_not_looked_for(tmp_path: Path, held: Held) -> None:
    with opened(tmp_path, in_host=False, controller=True) as tiers:
        fill(tiers, load_s=1e-3)
        tiers.want("r", needed(held))
        assert not tiers.loader.is_held("r")
        assert tiers.loader.bring_in("r") == {}
        assert not tiers.counted
        tiers.check_nothing_waits()


def test_what_turns_out_to_be_no_better_is_not_loaded(tmp_path: Path) -> None:
    """Its ledger does not say behind what it was computed; the tier does."""
    other = variant(1, start=9, context=(B,))
    DiskMedium(tmp_path, FINGERPRINT).write(stored(other))
    with open_tiers({"disk": tmp_path}) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(other).info.listed)
        tiers.want("r", needed(held(share=0.6)))
        tiers.settle("r")
        (found,) = tiers.loader.bring_in("r").values()
        assert (found.stored, found.is_held) == (None, True)
        assert not tiers.counted, "the pool's is used, as without tiers"
        tiers.check_nothing_waits()


def test_host_memory_is_used_where_the_better_one_cannot_be_read(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        fill(tiers)
        (path,) = tmp_path.glob("*/*/*/*.kv")
        path.unlink()
        assert result(tiers.load(needed())[0]) == ("host", None)
        tiers.check()


def test_host_memory_is_used_where_the_better_one_comes_too_late(tmp_path: Path) -> None:
    with opened(tmp_path, slow={"disk": (1e9, 1.0)}, timeout_s=0.2) as tiers:
        fill(tiers)
        assert result(tiers.load(needed())[0]) == ("host", None)


def test_a_search_of_who_holds_a_variant_does_not_answer_for_who_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "MAX_STAGED_BYTES", 1)
    with opened(tmp_path, in_host=False, slow={"disk": (1e9, 0.3)}) as tiers:
        fill(tiers)
        tiers.want("first", wanted(2))  # takes the room
        tiers.want("held", needed(held(ELSEWHERE.name, share=0.6)))
        tiers.want("none", needed())
        tiers.settle("first", "held", "none")
        assert result(tiers.loader.bring_in("none")[needed().key]) == ("disk", None)


def test_nothing_is_left_of_a_load_that_never_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "MAX_STAGED_BYTES", 1)
    with opened(tmp_path, in_host=False, slow={"disk": (1e9, 0.3)}) as tiers:
        fill(tiers)
        tiers.want("first", wanted(2))  # takes the room
        tiers.want("second", needed())
        tiers.loader.poll(["first"])  # the second is gone
        assert set(tiers.loader._searches) == {wanted(2).key}
        tiers.settle("first")
