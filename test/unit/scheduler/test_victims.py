"""Orders of eviction by themselves; test_index_stateful.py has them in the index."""

from __future__ import annotations

from array import array

import pytest

from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.index.victims import VictimOrder, victim_order


def used(variant_id: int, frequency: float) -> Variant:
    variant = Variant(variant_id, bytes([variant_id]) * 16, 3, 0, 0, (), 0, NodeHome(array("q", [0, 1, 2]), "chunk"))
    variant.last_use, variant.reuse_frequency = variant_id, frequency
    return variant


def evict(order: VictimOrder) -> int:
    victim = order.first()
    order.forget(victim)
    return victim.variant_id


@pytest.mark.parametrize(
    ("ageing", "expected"),
    [
        (0.0, [4, 2, 1, 3]),  # Cache-Craft section 3.3: by lowest f_r, whenever it was gained
        (1.0, [2, 4, 1, 3]),  # what is new has the worth of the last victim
    ],
)
def test_without_ageing_the_lowest_reuse_frequency_goes_first(ageing: float, expected: list[int]) -> None:
    order = victim_order("frequency-reuse", ageing)
    for variant in (used(1, 6.0), used(2, 4.0), used(3, 9.0), used(5, 3.0)):
        order.add(variant)
    assert evict(order) == 5
    order.advance_age(ageing)
    order.add(used(4, 1.0))
    assert order.age == (0.0 if ageing == 0.0 else 4.0)
    assert [evict(order) for _ in range(4)] == expected
