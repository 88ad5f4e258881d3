"""Pool: who goes first under each policy, by hand; the bound and the books under random use."""

from __future__ import annotations

import random
from array import array

import pytest
from benchmark.simulate.store import POLICIES, SYSTEM, Node, Pool

from chunk_cache.index.variant import NodeHome, Variant


def filled(policy: str, num: int = 3, length: int = 10) -> tuple[Pool, list[Node]]:
    """A pool that is full of `num` own nodes, added in order."""
    pool = Pool(num * length, policy)
    assert pool.reserve(num * length)
    nodes = [pool.add_own(length) for _ in range(num)]
    pool.release()
    return pool, nodes


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ("lru", 1),  # used: 0 1 1 2 0; the last use of 1 lies furthest back
        ("fifo", 0),  # the first that came
        ("lfu", 2),  # 0 and 1 were used twice, 2 once
        ("frequency-reuse", 1),  # worth 5, 2, 3
    ],
)
def test_each_policy_evicts_the_node_it_should(policy: str, gone: int) -> None:
    pool, nodes = filled(policy)
    for i, worth in ((0, 4.0), (1, 1.0), (1, 2.0), (2, 3.0), (0, 5.0)):
        pool.use(nodes[i], worth)
    assert pool.reserve(10)
    assert [node.is_stored for node in nodes] == [i != gone for i in range(3)]
    pool.check_integrity()


def test_a_node_in_front_of_another_stays() -> None:
    pool = Pool(40, "lru")
    assert pool.reserve(40)
    system, first, second, question = pool.add_path([SYSTEM, 0, 1, -9], [10, 10, 10, 10])
    pool.release()
    pool.use_prefix([system])
    assert pool.reserve(10)
    assert not question.is_stored
    assert pool.reserve(10)
    assert (system.is_stored, first.is_stored, second.is_stored) == (True, True, False)
    assert pool.match([SYSTEM, 0, 1]) == [system, first]


def test_a_used_variant_lifts_the_path_in_front_of_it() -> None:
    pool = Pool(40, "frequency-reuse")
    assert pool.reserve(40)
    path = pool.add_path([SYSTEM, 0], [10, 10])
    others = [pool.add_own(10), pool.add_own(10)]
    pool.release()
    pool.use(path[1], 7.0)
    pool.use(others[0], 6.0)
    for expected in (others[1], others[0], path[1], path[0]):
        assert pool.reserve(10)
        assert not expected.is_stored
    assert pool.num_stored == 0


def test_what_is_locked_is_passed_over_and_goes_later() -> None:
    pool, nodes = filled("lru")
    pool.lock([nodes[0]])
    assert pool.reserve(20)
    assert not pool.reserve(10)
    assert nodes[0].is_stored
    pool.unlock([nodes[0]])
    assert pool.reserve(10)
    assert not nodes[0].is_stored


def test_a_new_node_begins_with_the_age() -> None:
    evicted: list[int] = []
    pool = Pool(20, "frequency-reuse", age=lambda: 3.0 * len(evicted), on_evicted=evicted.append)
    assert pool.reserve(20)
    old, _ = pool.add_own(10), pool.add_own(10)
    pool.release()
    pool.use(old, 2.0)
    assert pool.reserve(10)
    new = pool.add_own(10)
    pool.release()
    assert evicted == [10]
    assert pool.reserve(10)  # the newcomer is worth 3, the node that was used 2
    assert (old.is_stored, new.is_stored) == (False, True)


def test_a_variant_is_found_until_its_node_goes() -> None:
    pool, nodes = filled("fifo")
    variant = Variant(5, b"key", 10, 0, 0, (), 0, NodeHome(array("b", bytes(10)), ""))
    pool.settle(nodes[0], variant)
    assert pool.resolve(variant) == 10
    pool.settle(nodes[1], variant)  # it moves
    assert pool.node_of(variant) is nodes[1]
    assert pool.num_dead(lambda _: True) == 20
    assert pool.reserve(20)
    assert pool.resolve(variant) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_books_and_bound_hold_under_random_use(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(300, policy, share=draw.choice([1.0, 0.4]))
    for step in range(150):
        owner = draw.choice([b"one", b"two"])
        prefix = pool.match([SYSTEM, *draw.choices(range(4), k=3)], owner)
        pool.lock(prefix[-1:])
        labels = [SYSTEM, *draw.choices(range(4), k=3), -step - 2]
        lengths = [5 + label % 4 for label in labels]
        assert pool.reserve(sum(lengths) + 8)
        pool.use_prefix(prefix)
        nodes = pool.add_path(labels, lengths, owner)
        pool.use(draw.choice(nodes), draw.random() * 10)
        pool.add_own(8, owner=owner)
        pool.release()
        pool.unlock(prefix[-1:])
        pool.check_integrity()
    assert pool.num_evicted > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_partition_above_its_share_gives_way_first(policy: str) -> None:
    pool = Pool(100, policy, share=0.5)
    quiet, noisy = [b"quiet" + bytes([i]) for i in range(2)], b"noisy"
    assert pool.reserve(80)
    others = [pool.add_own(10, owner=owner) for owner in quiet]
    path = pool.add_path([SYSTEM, 0, -9], [10, 10, 10], noisy)
    own = [pool.add_own(10, owner=noisy) for _ in range(3)]
    assert pool.match([SYSTEM, 0], noisy) == path[:2]
    assert pool.match([SYSTEM, 0], quiet[0]) == []
    pool.release()
    assert pool.reserve(30)
    assert pool.shares.held(noisy) == 50
    assert all(node.is_stored for node in others)
    pool.check_integrity()
    assert pool.reserve(10)  # nobody is above: the order of all
    assert sum(node.is_stored for node in [*others, *path, *own]) == 6
    pool.check_integrity()
