"""What a replica tells: each change once, all of it again and again, and nothing that names a text or a tenant."""

from __future__ import annotations

import random
from collections import deque

from chunk_cache.events.event_keys import EventKeys
from chunk_cache.events.event_log import MAX_TOLD_AGAIN, POOL, Event, EventLog
from chunk_cache.keys import DEFAULT_PARTITION, Partition, chunk_key

KEYS = EventKeys("salt")
A, B = (chunk_key(Partition(), [number]) for number in (1, 2))


def log_of(buffer_len: int = 1000) -> EventLog:
    log = EventLog(KEYS, buffer_len)
    assert log.take() == [Event("cleared", None)], "whoever listened to an earlier process forgets it"
    return log


def stored(key: bytes, name: str = "n", tier: str = POOL, kind: str = "stored", num_tokens: int = 7) -> Event:
    chunk, tenant = KEYS.chunk(DEFAULT_PARTITION, key), KEYS.partition(DEFAULT_PARTITION)
    return Event(kind, tier, chunk, tenant, KEYS.variant(key, name), num_tokens)


def test_changes_are_told_once_and_in_order() -> None:
    log = log_of()
    pool, disk = log.observer(POOL), log.observer("disk", lambda size: size // 100)
    pool.stored(A, "n", DEFAULT_PARTITION, 7)
    disk.stored(A, "n", DEFAULT_PARTITION, 700)
    assert log.take() == [stored(A), stored(A, tier="disk")]
    assert log.take() == []
    pool.stored(B, "n", DEFAULT_PARTITION, 7)
    pool.removed(A, "n")
    assert log.take() == [stored(B), stored(A, kind="removed"), stored(A, tier="disk", kind="told_again")]
    pool.cleared()
    assert log.take()[0] == Event("cleared", POOL)
    assert len(log) == 1
    disk.removed(A, "n")
    disk.removed(A, "n")
    assert log.take() == [stored(A, tier="disk", kind="removed")]


def test_the_last_batches_tell_all_that_is_held() -> None:
    rng = random.Random(0)
    log = log_of(buffer_len=40)
    pool, held = log.observer(POOL), set[int]()
    buffer: deque[list[Event]] = deque(maxlen=40)
    for step in range(3000):
        for _ in range(rng.randrange(1, 4)):
            key = chunk_key(Partition(), [rng.randrange(2 + step % 700)])
            variant = KEYS.variant(key, "n")
            if variant in held:
                held.remove(variant)
                pool.removed(key, "n")
            else:
                held.add(variant)
                pool.stored(key, "n", DEFAULT_PARTITION, 1)
        buffer.append(log.take())
        told = set[int]()
        for event in (event for batch in buffer for event in batch):
            if event.kind == "removed":
                told.discard(event.variant)
            elif event.kind != "cleared":
                told.add(event.variant)
        assert told == held, step


def test_what_was_dropped_is_told_anew() -> None:
    log = log_of()
    pool = log.observer(POOL)
    keys = [chunk_key(Partition(), [number]) for number in range(2 * MAX_TOLD_AGAIN + 10)]
    for key in keys:
        pool.stored(key, "n", DEFAULT_PARTITION, 7)
    assert log.drop() == len(keys)
    pool.removed(keys.pop(), "n")
    assert log.has_news
    batches = [log.take() for _ in range(3)]
    assert batches[0][0] == Event("cleared", None)
    again = [event for batch in batches for event in batch if event.kind == "told_again"]
    assert list(dict.fromkeys(again)) == [stored(key, kind="told_again") for key in keys]
    assert not log.has_news
    assert log.take() == []


def test_what_comes_and_goes_meanwhile_is_not_counted_as_told() -> None:
    log = log_of()
    pool = log.observer(POOL)
    for number in range(1000):
        pool.stored(chunk_key(Partition(), [number]), "n", DEFAULT_PARTITION, 7)
    log.drop()
    for number in range(1000, 1600):
        pool.stored(chunk_key(Partition(), [number]), "n", DEFAULT_PARTITION, 7)
        pool.removed(chunk_key(Partition(), [number]), "n")
    told = set()
    while log.has_news:
        told |= {event.variant for event in log.take() if event.kind == "told_again"}
    assert len(told) == len(log) == 1000


def test_without_the_salt_numbers_tell_nothing() -> None:
    tenants = [Partition(cache_salt=salt).key for salt in (None, "a", "b")]
    numbers = {
        (salt, tenant): (keys.chunk(tenant, A), keys.partition(tenant))
        for salt in ("", "salt", "other")
        for tenant in tenants
        for keys in [EventKeys(salt)]
    }
    assert len(set(numbers.values())) == 9
    assert len({number for both in numbers.values() for number in both}) == 18
    assert numbers["salt", tenants[1]] == (KEYS.chunk(tenants[1], A), KEYS.partition(tenants[1]))
    assert all(-(2**63) <= number < 2**63 for both in numbers.values() for number in both)
    assert len({KEYS.variant(A, "n"), KEYS.variant(A, "m"), KEYS.variant(B, "n"), EventKeys("").variant(A, "n")}) == 4
