"""A store of a few bytes that forgets what was not used for longest, and what requests have computed so far."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from chunk_cache.index.transition_store import ChunkTransitions, TransitionStore


@dataclass(frozen=True)
class Map:
    """A transition of so many bytes."""

    num_bytes: int

    def then(self, later: Map) -> Map:
        return Map(self.num_bytes + later.num_bytes)


def test_a_chunk_that_begins_anew_forgets_its_parts():
    known = ChunkTransitions()
    known.note(0, 10, 20, Map(1))
    known.note(0, 10, 40, Map(2))
    assert known.reaches(0) == 40
    assert known.of(0, 40) == Map(2)
    known.note(0, 40, 50, Map(4))
    assert (known.of(0, 40), known.of(0, 50), known.num_bytes) == (None, Map(6), 6)


@pytest.fixture
def known():
    return set(range(10))


def test_beyond_its_bytes_the_one_not_used_for_longest_goes(known):
    one, changes = Map(5), []
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: changes.append(1))
    for variant in (0, 1):
        store.put(variant, one)
    store.use(0)
    store.put(2, one)
    assert [variant in store for variant in range(3)] == [True, False, True]
    assert store.num_bytes == 2 * one.num_bytes
    assert len(changes) == 3
    known.discard(0)
    store.use(0)
    store.put(3, one)
    assert [variant in store for variant in range(4)] == [False, False, True, True], "unknown variants go first"
    store.clear()
    assert (len(store), store.num_bytes) == (0, 0)


def test_who_keeps_it_elsewhere_is_told_before_it_goes(known):
    one, told = Map(5), []
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    store.note_leaving = lambda variant: told.append((variant, variant in store))
    for variant in (0, 1, 2):
        store.put(variant, one)
    assert told == [(0, True)]


def test_what_is_pinned_stays_and_what_has_no_room_beside_it_does_not_fit(known):
    one = Map(5)
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    store.is_kept = {0}.__contains__
    for variant in (0, 1, 2):
        store.put(variant, one)
    assert [variant in store for variant in range(3)] == [True, False, True]
    store.is_kept = {0, 2}.__contains__
    assert not store.fits(one)


def test_running_requests_have_no_more_than_is_stored(known):
    one = Map(5)
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    requests = [store.of_request() for _ in range(2)]
    for request in requests:
        assert store.may_take(one.num_bytes)
        request.note(0, 10, 20, one)
    assert not store.may_take(1)
    requests[0].drop(0)
    assert store.may_take(one.num_bytes)
    del request, requests
    assert store.may_take(2 * one.num_bytes), "what a request had that is gone counts no more"


def test_what_is_larger_than_the_store_does_not_fit(known):
    one = Map(5)
    store = TransitionStore(one.num_bytes - 1, is_known=known.__contains__, note_change=lambda: None)
    assert not store.fits(one)
    assert TransitionStore(one.num_bytes, is_known=known.__contains__, note_change=lambda: None).fits(one)
