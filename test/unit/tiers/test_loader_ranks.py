"""TierLoader on two ranks of tensor parallelism: what they agree on, over real media."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.need import Need
from chunk_cache.tiers.variant_search import Held
from sglang_chunk_cache.tiers.disk import DiskMedium
from unit.tiers.medium_suite import FINGERPRINT
from unit.tiers.tier_harness import (
    PATIENCE_S,
    SIZE,
    Ranks,
    Tiers,
    file_of,
    flip,
    open_tiers,
    result,
    stored,
    variant,
    wanted,
    write,
)

SLOW = {"disk": (1e9, 0.15)}  # finding and reading take that long each


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


def test_ranks_with_other_statistics_of_the_same_variant_use_none(pair: Pair) -> None:
    """Rows are chosen by them, and every rank must compute the same rows."""
    for rank, folder in enumerate(pair.folders):
        one = stored(variant(1))
        values = np.full(len(one.info.token_ids), rank, dtype=np.float32)
        statistics = ChunkStatistics(values, values, np.zeros(len(one.info.context), dtype=np.float32))
        one = replace(one, info=replace(one.info, statistics=statistics))
        DiskMedium(folder, FINGERPRINT).write(one)
    assert pair.load(1) == [[("disk", "tier_ranks")]] * 2


@pytest.mark.parametrize(("known", "load_s", "is_used"), [((0, 1), (1e-3, 2e-3), True), ((0,), (1e-3, 1e-3), False)])
@pytest.mark.parametrize("slow_rank", [None, 0, 1])
def test_ranks_look_alike_for_what_is_better_than_the_pools(
    tmp_path: Path, known: tuple[int, ...], load_s: tuple[float, float], is_used: bool, slow_rank: int | None
) -> None:
    """All or none wait, by the slowest load; what one rank lacks no rank uses, and it stays where it is."""
    one, context = variant(1, context=(wanted(8).key,)), (wanted(8).key,)
    held = Held(1.0, 1, has_prepared=False, names=frozenset(), worst_rank=None)
    chunk = replace(wanted(1), need=Need(3, context), held=held)
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, controller=True)
        for rank, tiers in enumerate(pair.ranks):
            disk = tiers.tier("disk")
            if rank in known:
                disk.medium.write(stored(one))
                tiers.writer.adopt(disk, stored(one).info.listed)
            for i in range(40):
                num = 1 + i % 3
                disk.reads.observe(num * SIZE, num * (900.0 if rank == slow_rank else load_s[rank]))
                tiers.prefill_cost.observe(50 * num, 50 * num, 50.0 * num)

        def load(tiers: Tiers) -> tuple[bool, dict[bytes, Any]]:
            tiers.want("r", chunk)
            is_held = tiers.loader.is_held("r")
            tiers.settle("r")
            return is_held, {key: found.stored for key, found in tiers.loader.bring_in("r").items()}

        outcomes = pair.both(load)
        assert [is_held for is_held, _ in outcomes] == [slow_rank is None] * 2
        for rank, (_, found) in enumerate(outcomes):
            assert any(stored is not None for stored in found.values()) == (is_used and slow_rank is None)
            assert pair.ranks[rank].tier("disk").ledger.contains(stored(one).info.entry_id) == (rank in known)
