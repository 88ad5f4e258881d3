"""Shares: who is above the share, and how much goes there when room is needed."""

from __future__ import annotations

import math

from chunk_cache.index.quota import LOOK_SHARE, Shares


def test_partitions_above_their_share_give_up_a_part_of_it_at_least() -> None:
    shares = Shares(400, 0.4)
    assert shares.is_limited
    assert shares.most == 160
    shares.add(b"a", 160)
    assert (shares.above, shares.num_to_give(50)) == ((), 0)
    shares.add(b"a", 1)
    assert shares.above == (b"a",)
    assert [shares.num_to_give(n) for n in (0, 1, 50)] == [0, 160 * LOOK_SHARE, 50]
    assert shares.least == 150


def test_without_a_quota_nobody_gives_way() -> None:
    shares = Shares(400)
    shares.add(b"a", 400)
    assert not shares.is_limited
    assert math.isinf(shares.most)
    assert shares.num_to_give(50) == 0
