"""Who holds what, learned from real publishers over real sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chunk_cache.events.event_messages import Batch
from chunk_cache.keys import Partition, chunk_key
from chunk_cache_tools import holders as module
from chunk_cache_tools.holders import Holders
from sglang_chunk_cache.telemetry import event_publisher as events
from unit.events.replica import SALT, TOKENS_PER_CHUNK, Replica, tokens

N = TOKENS_PER_CHUNK
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.1)
    monkeypatch.setattr(module, "LOST_S", 1.0)


@pytest.fixture
def follow() -> Iterator[Callable[..., Holders]]:
    opened = []

    def make(*replicas: Replica, salt: str = SALT, **options: Any) -> Holders:
        opened.append(Holders({one.name: one.source for one in replicas}, salt, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def held(holders: Holders, numbers: range, **options: Any) -> dict[str, int]:
    return holders.who_holds([tokens(number) for number in numbers], **options)


def eventually(holders: Holders, numbers: range, expected: dict[str, int], **options: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := held(holders, numbers, **options)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == expected


def test_two_replicas_with_removal_and_clearing(replica, follow) -> None:
    a, b = replica("a"), replica("b")
    holders = follow(a, b)
    a.store(range(4))
    b.store(range(2, 8))
    eventually(holders, range(10), {"a": 4 * N, "b": 6 * N})
    assert held(holders, range(3)) == {"a": 3 * N, "b": N}
    a.remove(range(3))
    eventually(holders, range(10), {"a": N, "b": 6 * N})
    b.clear()
    a.store([5])
    eventually(holders, range(10), {"a": 2 * N, "b": 0})
    assert holders.who_holds([tokens(5), tokens(5)]) == {"a": N, "b": 0}, "named twice, counted once"


def test_what_happened_before_is_learned(replica, follow) -> None:
    a = replica("a")
    for number in range(50):
        a.store([number])
    a.remove(range(10))
    eventually(follow(a), range(100), {"a": 40 * N})


def test_a_chunk_is_held_until_its_last_variant_is_gone(replica, follow) -> None:
    a = replica("a")
    holders = follow(a)
    a.store([0], name="first")
    a.store([0], name="second")
    a.store([0], tier="disk", name="second")
    a.remove([0], name="first")
    eventually(holders, range(1), {"a": N}, tiers=("pool",))
    a.remove([0], name="second")
    eventually(holders, range(1), {"a": 0}, tiers=("pool", "host"))
    assert held(holders, range(1), tiers=("disk",)) == {"a": N}
    a.clear("disk")
    eventually(holders, range(1), {"a": 0})


def test_who_may_ask(replica, follow) -> None:
    a, tenant = replica("a"), Partition(cache_salt="acme")
    a.store([0], partition=tenant)
    knows, stranger = follow(a), follow(a, salt="other")
    assert stranger.wait(PATIENCE_S)
    eventually(knows, range(1), {"a": N}, partition=tenant)
    assert held(knows, range(1)) == {"a": 0}
    assert held(stranger, range(1), partition=tenant) == held(stranger, range(1)) == {"a": 0}
    assert knows.who_holds([chunk_key(tenant, tokens(0))], tenant) == {"a": N}
    with pytest.raises(ValueError, match="chunks: a text, and Holders has no encode; give it one"):
        knows.who_holds(["text"], tenant)
    by_text = follow(a, encode=lambda text: tokens(int(text)))
    assert by_text.wait(PATIENCE_S)
    assert by_text.who_holds(["0", "1"], tenant) == {"a": N}


def lose(one: Replica) -> None:
    """A number that nobody ever gets."""
    one.events._publisher.publish(Batch(0.0, [object()], None, "lost"))  # type: ignore[list-item]


def test_a_gap_is_closed_by_asking(replica, follow, monkeypatch) -> None:
    a = replica("a")
    holders = follow(a)
    assert holders.wait(PATIENCE_S)
    follower = holders._followers["a"]
    take, num_left_out = follower._take_live, 0

    def take_some(seq: int, batch: Batch) -> None:
        nonlocal num_left_out
        if seq % 3 == 1:
            num_left_out += 1
            return
        take(seq, batch)

    monkeypatch.setattr(follower, "_take_live", take_some)
    for number in range(30):
        a.store([number])
    a.remove(range(5))
    eventually(holders, range(100), {"a": 25 * N})
    assert num_left_out > 5


def test_what_is_lost_for_good_is_forgotten_and_told_again(replica, follow) -> None:
    a = replica("a")
    holders = follow(a)
    a.store(range(3))
    eventually(holders, range(3), {"a": 3 * N})
    lose(a)
    a.store([3])
    eventually(holders, range(4), {"a": 2 * N})  # the new one, and one that was told again with it
    a.store([4])
    a.store([5])
    eventually(holders, range(6), {"a": 6 * N})


def test_a_listener_that_comes_late_learns_all_of_a_short_buffer(replica, follow, monkeypatch) -> None:
    monkeypatch.setattr(events, "BUFFER_LEN", 20)
    a = replica("a")
    a.store(range(100))
    for number in range(100, 200):
        a.store([number])
        a.remove([number])
    eventually(follow(a), range(200), {"a": 100 * N})


def test_a_server_that_was_started_anew_holds_what_it_says(replica, follow) -> None:
    a, b = replica("a"), replica("b")
    holders = follow(a, b)
    b.store([0])
    for number in range(5):
        a.store([number])
    eventually(holders, range(5), {"a": 5 * N, "b": N})
    a.stop()
    eventually(holders, range(5), {"b": N})
    a.start()
    eventually(holders, range(5), {"a": 0, "b": N})
    for number in range(3, 12):  # more than the numbers of the one before it
        a.store([number])
    eventually(holders, range(20), {"a": 9 * N, "b": N})


def test_a_server_that_was_started_anew_before_it_was_missed(replica, follow) -> None:
    """With more numbers than its predecessor had."""
    a = replica("a")
    holders = follow(a)
    a.store(range(5))
    eventually(holders, range(5), {"a": 5 * N})
    a.stop()
    a.start()
    for number in range(10, 20):
        a.store([number])
    eventually(holders, range(20), {"a": 10 * N})


def test_a_client_needs_neither_torch_nor_sglang() -> None:
    program = "import sys, chunk_cache_tools.holders; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_replica_that_was_never_there(follow, replica, tmp_path) -> None:
    a, never = replica("a"), Replica(tmp_path, "never")
    never.stop()
    holders = follow(a, never)
    a.store([0])
    eventually(holders, range(1), {"a": N})
    assert not holders.wait(0.0)
