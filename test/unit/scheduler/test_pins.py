"""Pins against an index and a store of numbers: bounds, ends, moves; every lock is released once."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.pins import Pins, variants_of
from chunk_cache.index.variant import NodeHome, PathHome, PathTokens, Variant
from chunk_cache.keys import Partition


class Store:
    """Locks are counted; what a lock keeps is the chunk and what lies in front of it."""

    def __init__(self) -> None:
        self.locks: list[Variant] = []
        self.gone: set[int] = set()

    def resolve(self, variant: Variant) -> int:
        return 0 if variant.variant_id in self.gone else variant.length

    def lock_chunk(self, variant: Variant) -> Any:
        self.locks.append(variant)
        return (len(self.locks), variant, variant.holder)

    def unlock(self, lock: Any) -> None:
        self.locks.remove(lock[1])

    def locked_len(self, locks: Any) -> int:
        return sum(v.length + (v.start if isinstance(holder, PathTokens) else 0) for _, v, holder in locks)


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(max_variants=4, max_variants_per_chunk=2, max_path_tokens=10_000)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def pins(index, store) -> Pins:
    return Pins(index, store, max_tokens=100)


def key(i: int) -> bytes:
    return bytes([i]) * 16


def add(index: ChunkIndex, i: int, length: int = 20, start: int = 5, context: tuple[bytes, ...] = ()) -> Variant:
    path = PathTokens(array("q", range(start + length)), Partition())
    variant = index.add(key(i), length=length, start=start, generation=0, context=context, home=PathHome(path, start))
    assert variant is not None
    return variant


def test_what_no_request_may_use_is_not_pinned(index, store):
    pins = Pins(index, store, max_tokens=100, is_trust_limited=True)
    add(index, 1, length=10)
    add(index, 1, length=20, context=(key(9),))
    add(index, 2, context=(key(9),))
    assert pins.pin([key(1), key(2)], until=9.0).pinned == {key(1): 10}
    assert [variant.context for variant in store.locks] == [()]


def test_pin_and_unpin(index, store, pins):
    a, b = add(index, 1), add(index, 2)
    result = pins.pin([key(1), key(3), key(2)], until=9.0)
    assert (result.pinned, result.num_tokens, result.is_refused) == ({key(1): 20, key(2): 20}, 50, False)
    assert (pins.until(a), pins.until(b), len(pins)) == (9.0, 9.0, 2)
    assert pins.unpin([key(3), key(1)]) == [key(1)]
    assert store.locks == [b]
    assert pins.unpin() == [key(2)]
    assert store.locks == []


def test_the_later_end_counts(index, store, pins):
    add(index, 1)
    for until in (5.0, 9.0, 7.0):
        pins.pin([key(1)], until)
    assert len(store.locks) == 1
    assert pins.expire(5.0) == pins.expire(7.0) == []
    assert pins.expire(9.0) == [key(1)]
    assert store.locks == []


def test_all_or_none_at_the_limit(index, store, pins):
    for i in (1, 2, 3):
        add(index, i, length=30)
    pins.pin([key(1)], until=5.0)
    result = pins.pin([key(1), key(2), key(3)], until=9.0)
    assert (result.is_refused, result.pinned, result.num_tokens) == (True, {}, 105)
    assert len(store.locks) == 1
    assert pins.expire(5.0) == [key(1)], "a refused call changes no end"


def test_nothing_is_pinned_where_others_need_the_room(index, store, pins):
    add(index, 1)
    assert pins.pin([key(1)], until=5.0, has_room=lambda: False).is_refused
    assert store.locks == []


def test_a_pin_that_grows_beyond_the_limit_ends(index, store, pins):
    """The chunk is found behind a long prompt later, all of which a lock would keep."""
    first, other = add(index, 1), add(index, 2)
    pins.pin([key(1), key(2)], until=5.0)
    add(index, 1, start=90, context=(key(8),))
    index.discard(first.variant_id)
    pins.renew()
    assert (store.locks, len(pins), pins.num_lost) == ([other], 1, 1)


def test_what_is_gone_is_not_pinned(index, store, pins):
    store.gone.add(add(index, 1).variant_id)
    assert pins.pin([key(1)], until=5.0).pinned == {}


def test_a_lock_follows_a_variant_that_moves(index, store, pins):
    variant = add(index, 1, start=60)
    pins.pin([key(1)], until=5.0)
    assert pins.num_tokens == 80
    index.move(variant, NodeHome(array("q", range(20)), "namespace"))
    pins.renew()
    assert (pins.num_tokens, store.locks) == (20, [variant])


def test_another_variant_takes_the_place_of_a_dropped_one(index, store, pins):
    first = add(index, 1)
    pins.pin([key(1)], until=5.0)
    second = add(index, 1, start=9, context=(key(8),))
    index.discard(first.variant_id)
    pins.renew()
    assert (store.locks, pins.until(second), pins.num_lost) == ([second], 5.0, 0)
    index.discard(second.variant_id)
    pins.renew()
    assert (store.locks, len(pins), pins.num_lost) == ([], 0, 1)


def test_forget_all_releases_nothing(index, store, pins):
    add(index, 1)
    pins.pin([key(1)], until=5.0)
    pins.forget_all()
    assert (len(pins), len(store.locks)) == (0, 1), "the tree has forgotten its locks itself"


def test_variants_of_counts_no_lookup(index):
    a, b = add(index, 1), add(index, 2)
    c = add(index, 1, start=9, context=(key(8),))
    assert variants_of(index, [key(2), key(7), key(1)]) == {key(2): [b], key(1): [a, c]}
    assert index.counters.num_lookups == 0
