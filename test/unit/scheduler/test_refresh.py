"""RefreshQueue: bounded, most popular first, and it forgets what the index forgot."""

from __future__ import annotations

from array import array

import pytest

from chunk_cache.index import refresh
from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.refresh import Origin, RefreshQueue
from chunk_cache.index.variant import Variant
from chunk_cache.keys import Partition
from unit.scheduler.dict_store import LENS, TOKENS, new_node


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(max_variants=100, max_variants_per_chunk=8, max_path_tokens=1000)


def add(index: ChunkIndex, number: int, num_uses: int = 0, weight: float = 1.0) -> Variant:
    """A derived variant that was used so often."""
    variant = index.add(
        bytes([number]) * 16, length=LENS[0], start=0, generation=1, context=(b"c" * 16,), home=new_node(TOKENS[0])
    )
    assert variant is not None
    for _ in range(num_uses):
        index.touch(variant, weight)
    return variant


def origin(number: int) -> Origin:
    return Origin(array("q", [number]), ((0, 1),), Partition())


def queue_of(index: ChunkIndex, *num_uses: int, min_uses: int = 2) -> RefreshQueue:
    queue = RefreshQueue(index, min_uses)
    for number, uses in enumerate(num_uses):
        queue.note(add(index, number, uses), origin(number))
    return queue


def test_the_most_popular_goes_first_and_once(index: ChunkIndex) -> None:
    queue = queue_of(index, 2, 5, 1, 3)
    assert [queue.take() for _ in range(4)] == [origin(1), origin(3), origin(0), None]


def test_popular_is_what_little_must_be_fixed_of(index: ChunkIndex) -> None:
    queue = queue_of(index, 5)
    queue.note(add(index, 1, num_uses=2, weight=4.0), origin(1))
    assert queue.take() == origin(1)


def test_what_is_not_popular_yet_waits(index: ChunkIndex) -> None:
    queue = queue_of(index, 1)
    assert queue.take() is None
    (variant,) = index
    index.touch(variant)
    assert queue.take() == origin(0)


def test_what_the_index_forgot_is_forgotten(index: ChunkIndex) -> None:
    queue = queue_of(index, 3, 5, 4)
    index.discard(1)
    exact = index.add(
        bytes([2]) * 16, length=LENS[0], start=0, generation=0, context=(b"c" * 16,), home=new_node(TOKENS[0])
    )
    assert exact is not None
    assert [queue.take() for _ in range(2)] == [origin(0), None]


def test_only_the_newest_are_kept(index: ChunkIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "MAX_NOTED", 2)
    queue = queue_of(index, 9, 4, 5)
    assert [queue.take() for _ in range(3)] == [origin(2), origin(1), None]


def test_a_variant_that_is_stored_again_is_new(index: ChunkIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "MAX_NOTED", 2)
    queue = queue_of(index, 9, 4)
    again = index.get(0)
    assert again is not None
    queue.note(again, origin(7))
    queue.note(add(index, 5, num_uses=2), origin(5))
    assert [queue.take() for _ in range(3)] == [origin(7), origin(5), None]


def test_after_a_flush_nothing_is_left(index: ChunkIndex) -> None:
    queue = queue_of(index, 3)
    queue.clear()
    assert queue.take() is None


def test_a_prompt_with_an_evicted_chunk_is_not_computed_again(index: ChunkIndex) -> None:
    queue = queue_of(index, 3, 5, 4)
    queue.forget([bytes([1]) * 16])
    assert [queue.take() for _ in range(3)] == [origin(2), origin(0), None]
    queue = queue_of(index, 3, 5)
    queue.forget([b"c" * 16])
    assert queue.take() is None, "the chunk stands in front of both"


def test_no_uses_means_never(index: ChunkIndex) -> None:
    assert queue_of(index, 9, min_uses=0).take() is None
