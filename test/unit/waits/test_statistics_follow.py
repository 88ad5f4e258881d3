"""A chunk is there at once; its statistics follow it, in order, on all ranks from the same step on."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from chunk_cache.actions import Keep
from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.variant import NodeHome, Variant
from sglang_chunk_cache.kv.chunk_sums import ChunkSums
from sglang_chunk_cache.kv.keeper import ChunkKeeper
from sglang_chunk_cache.kv.ranks import of_one_rank
from unit.tiers.tier_harness import Ranks

LENGTH = 4


class Arriving:
    """In the place of a `Download`."""

    def __init__(self, value: torch.Tensor) -> None:
        self.is_there = False
        self._value = value

    def read(self) -> torch.Tensor:
        assert self.is_there, "nobody may wait for it"
        return self._value


class Rank:
    """A keeper over an index; `note` is what the tiers below would be told."""

    def __init__(self, reduce_max: Any = of_one_rank) -> None:
        self.index = ChunkIndex(16, 8, 1000)
        self.noted: list[int] = []
        self.keeper = ChunkKeeper(
            *(None, self, SimpleNamespace(transitions=None), None, None),
            refresh=None,
            metrics=None,
            note_stored=lambda variant: self.noted.append(variant.variant_id),
            reduce_max=reduce_max,
        )
        self.downloads: list[Arriving] = []

    def complete(self, key: bytes, keep: Keep, home: NodeHome) -> Variant | None:
        """As the manager."""
        return self.index.add(key, length=LENGTH, start=0, generation=0, context=(), home=home)

    def store(self, number: int, *, computed: bool = True) -> Variant:
        """A chunk, of which the sums are on their way; `computed`: there are any."""
        sums = ChunkSums(((0, LENGTH),), num_layers=1)
        if computed:
            outside, received = torch.full((LENGTH,), float(number)), torch.ones(LENGTH)
            self.downloads.append(Arriving(torch.cat([outside, received])))
            sums.add(0, 0, LENGTH, self.downloads[-1], at=0)
        key = bytes([number]) * 16
        state: Any = type("State", (), {"sums": sums, "prompt": key})
        home = NodeHome(array("q", range(LENGTH)), f"node {number}")
        self.keeper._keep(None, state, Keep(0, generation=0, in_path=False), home)
        (variant,) = self.index.variants_of(key)
        return variant


def outside(variant: Variant) -> list[float] | None:
    return None if variant.statistics is None else variant.statistics.outside.tolist()


def test_a_chunk_is_found_before_its_statistics_have_come() -> None:
    rank = Rank()
    variant = rank.store(1)
    rank.keeper.poll()
    assert rank.index.lookup(variant.key, lambda one: one.length).variant is variant
    assert (outside(variant), rank.noted, rank.keeper.is_waiting) == (None, [], True)
    version = rank.index.version
    rank.downloads[0].is_there = True
    rank.keeper.poll()
    assert (outside(variant), rank.noted, rank.keeper.is_waiting) == ([1.0] * LENGTH, [variant.variant_id], False)
    assert rank.index.version > version, "a plan that was made without them is made anew"


def test_what_nothing_was_computed_of_waits_for_nothing() -> None:
    rank = Rank()
    variant = rank.store(1, computed=False)
    assert (outside(variant), rank.noted, rank.keeper.is_waiting) == (None, [variant.variant_id], False)


def test_statistics_take_effect_in_the_order_of_their_chunks() -> None:
    rank = Rank()
    first, second = rank.store(1), rank.store(2)
    rank.downloads[1].is_there = True
    rank.keeper.poll()
    assert (outside(first), outside(second)) == (None, None)
    rank.downloads[0].is_there = True
    rank.keeper.poll()
    assert rank.noted == [first.variant_id, second.variant_id]


def test_a_chunk_that_is_gone_gets_none() -> None:
    rank = Rank()
    gone, left = rank.store(1), rank.store(2)
    rank.index.discard(gone.variant_id)
    for download in rank.downloads:
        download.is_there = True
    rank.keeper.poll()
    assert (outside(gone), rank.noted) == (None, [left.variant_id])
    rank.store(3)
    rank.keeper.clear()
    assert not rank.keeper.is_waiting


def test_ranks_use_them_from_the_same_step_on() -> None:
    ranks = Ranks()
    pair = [Rank(ranks.reduce_of(rank)) for rank in range(2)]
    variants = [[rank.store(number) for number in (1, 2, 3)] for rank in pair]
    arrivals = [((0,), ()), ((1, 2), (1,)), ((), (0,)), ((), (2,))]
    known = []
    with ThreadPoolExecutor(2) as threads:
        for arrived in arrivals:
            for rank, numbers in zip(pair, arrived, strict=True):
                for number in numbers:
                    rank.downloads[number].is_there = True
            list(threads.map(lambda rank: rank.keeper.poll(), pair))
            known.append([sum(outside(one) is not None for one in own) for own in variants])
    assert known == [[0, 0], [0, 0], [2, 2], [3, 3]]
    assert not any(rank.keeper.is_waiting for rank in pair)


def test_parts_of_several_forwards_add_up() -> None:
    """A chunk that two steps of chunked prefill compute; the second found one token that the first did not see."""
    sums = ChunkSums(((0, 2), (2, 6)), num_layers=2)
    parts = [
        # outside of three rows, received by them, on the first chunk, on the text behind that
        (2, 5, [1.0, 2.0, 3.0, *[4.0, 2.0, 0.0], 8.0, 3.0]),
        (5, 6, [5.0, *[1.0, 1.0, 1.0, 0.0], 2.0, 1.0]),
    ]
    for begin, end, values in parts:
        download = Arriving(torch.tensor([9.0, *values]))
        sums.add(1, begin, end, download, at=1)
        assert not sums.is_there(1)
        download.is_there = True
    assert (sums.has(1), sums.has(0), sums.is_there(1)) == (True, False, True)
    found = sums.statistics(1)
    np.testing.assert_array_equal(found.outside, [0.5, 1.0, 1.5, 2.5])
    np.testing.assert_array_equal(found.received, [2.5, 1.5, 0.5, 0.0])
    np.testing.assert_array_equal(found.inter, [5.0])
