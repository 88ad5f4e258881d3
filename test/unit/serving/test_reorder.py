"""The reordering baseline: nothing is lost, and no other order shares a longer prefix with what was sent before."""

from __future__ import annotations

from itertools import permutations

import pytest
from benchmark.quality.question import DataError
from benchmark.serving.reorder import PEERS_DIR, Piloted, Rebuilder, Reorderer, SetOrderer
from hypothesis import given
from hypothesis import strategies as st

KEYS = st.lists(st.sampled_from("ABCDEF"), min_size=1, max_size=5)


def one(key: str) -> int:
    return 1


def test_the_known_path_comes_first() -> None:
    reorderer = Reorderer()
    assert reorderer.order("ACB", one) == ("A", "C", "B")
    assert reorderer.order("CDA", one) == ("A", "C", "D")


def test_repeated_chunks_are_sent_once() -> None:
    assert Reorderer().order("ABAB", one) == ("A", "B")


def test_what_many_want_stands_in_front_of_the_rest() -> None:
    reorderer = Reorderer()
    for keys in ("AX", "BX", "CX"):
        reorderer.order(keys, one)
    assert reorderer.order("DX", one) == ("X", "D")


def test_the_longer_text_wins() -> None:
    reorderer = Reorderer()
    reorderer.order("AB", one)
    reorderer.order("C", one)
    lengths = {"A": 1, "B": 1, "C": 5}
    assert reorderer.order("BCA", lengths.__getitem__)[0] == "C"


def test_what_the_prefix_cache_has_evicted_is_not_followed() -> None:
    for pool_len, expected in ((None, ("A", "B")), (100, ("A", "B")), (5, ("B", "A"))):
        reorderer = Reorderer(pool_len)
        reorderer.order("AB", one)
        for keys in ("BX", "BY"):  # B is wanted more often than A, and eight tokens are new
            reorderer.order(keys, one, 2)
        assert reorderer.order("AB", one)[:2] == expected


@given(st.lists(KEYS, max_size=8), KEYS)
def test_no_order_shares_a_longer_prefix(earlier: list[list[str]], keys: list[str]) -> None:
    reorderer = Reorderer()
    sent = [reorderer.order(one_request, one) for one_request in earlier]
    got = reorderer.order(keys, one)
    assert sorted(got) == sorted(set(keys))

    def shared(order: tuple[str, ...]) -> int:
        best = 0
        for other in sent:
            length = 0
            while length < min(len(order), len(other)) and order[length] == other[length]:
                length += 1
            best = max(best, length)
        return best

    assert shared(got) == max(shared(order) for order in permutations(sorted(set(keys))))


def test_behind_another_head_nothing_is_shared() -> None:
    reorderer: Reorderer[str] = Reorderer()
    reorderer.order("AB", one, head="S")
    assert reorderer.order("BA", one, head="T") == ("B", "A")
    assert reorderer.order("BA", one, head="S") == ("A", "B")


def test_runs_of_tokens_rebuild_an_earlier_beginning() -> None:
    system, first, second, new = range(100, 110), range(10, 16), range(20, 26), range(30, 38)
    rebuilder = Rebuilder(min_run=4)
    sent = [*system, *first, *second, 1]
    assert rebuilder.order(sent) == tuple(range(len(sent)))
    asked = [*system, *new, *second, *first, 2]
    order = [asked[place] for place in rebuilder.order(asked)]
    assert order == [*system, *first, *second, *new, 2]


def test_a_run_that_is_too_short_stays_where_it_is() -> None:
    rebuilder = Rebuilder(min_run=4)
    rebuilder.order([1, 2, 3, 4, 5, 6, 7, 8])
    assert rebuilder.order([5, 6, 7, 1, 2, 3, 4]) == (3, 4, 5, 6, 0, 1, 2)


def test_what_no_longer_lies_in_the_cache_is_not_rebuilt() -> None:
    rebuilder = Rebuilder(pool_len=10, min_run=1)
    rebuilder.order([1, 2, 3])
    rebuilder.order([11, 12, 13], rest_len=8)
    assert rebuilder.order([2, 1]) == (0, 1)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 3))
def test_every_token_is_sent_once(prompts: list[list[int]], min_run: int) -> None:
    rebuilder = Rebuilder(min_run=min_run)
    for tokens in prompts:
        assert sorted(rebuilder.order(tokens)) == list(range(len(tokens)))


def test_the_same_first_chunks_are_found_in_any_order() -> None:
    orderer: SetOrderer[str] = SetOrderer()
    orders = [orderer.order(keys) for keys in ("ABC", "BAD", "CA", "DBA")]
    # {A, B} as A B; {A, C} and {C} began nothing; {A, B, D} did, as A B D.
    assert orders == [tuple("ABC"), tuple("ABD"), tuple("CA"), tuple("ABD")]
    assert orderer.order("BA", head="T") == ("B", "A"), "behind another head nothing is shared"


def test_contextpilot_brings_shared_chunks_to_the_front() -> None:
    if not PEERS_DIR.exists():
        with pytest.raises(DataError, match="make peers"):
            Piloted()
        pytest.skip("`make peers` was not run")
    piloted = Piloted()
    orders = [piloted.order(keys) for keys in ("ABC", "DBA", "BAAE")]
    assert [sorted(order) for order in orders] == [list("ABC"), list("ABD"), list("ABE")]
    assert orders[1][:2] == orders[0][:2] == orders[2][:2]


@given(st.lists(KEYS, max_size=8))
def test_sets_lose_and_repeat_nothing(requests: list[list[str]]) -> None:
    orderer: SetOrderer[str] = SetOrderer()
    for keys in requests:
        assert sorted(orderer.order(keys)) == sorted(keys)
