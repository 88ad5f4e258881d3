"""Keys by which a gateway routes: those that share passages meet, and a replica of one's choice is reached."""

from __future__ import annotations

import random

import pytest

from chunk_cache_tools.routing import REPLICA_HEADER, ReplicaKeys, routing_key

PASSAGES = [f"passage {i}" for i in range(200)]


def test_the_order_does_not_matter_and_nothing_has_no_key():
    assert routing_key(PASSAGES[:5]) == routing_key(PASSAGES[4::-1]) == routing_key(iter(PASSAGES[:5]))
    assert routing_key(["a"]) == routing_key([b"a"])
    assert routing_key([]) == ""


def test_texts_of_one_chunk_have_one_key():
    assert len({routing_key([text]) for text in ("a b", "a b.", "a b\n", "\n\na b. ", " a b")}) == 1
    assert len({routing_key([text]) for text in ("a b", "a", "---", "--", b"a b\n")}) == 5


def test_the_chance_of_equal_keys_is_the_share_of_common_passages():
    rng = random.Random(0)
    pairs = []
    for _ in range(2000):
        drawn = rng.sample(PASSAGES, 9)
        pairs.append(routing_key(drawn[:6]) == routing_key(drawn[3:]))  # 3 of 9 in common
    assert sum(pairs) / len(pairs) == pytest.approx(1 / 3, abs=0.04)


def test_a_salt_makes_other_keys():
    keys = {routing_key(PASSAGES[:1], salt) for salt in ("", "a", "b")}
    assert len(keys) == 3
    assert all(len(key) == 32 and key.isascii() for key in keys), "a gateway takes up to 128 bytes"


def test_keys_to_replicas_are_learned_and_forgotten():
    keys = ReplicaKeys()
    first = keys.key_to("http://a")
    keys.note(first, {REPLICA_HEADER: "http://b"})
    assert keys.replicas() == ["http://b"]
    assert keys.key_to("http://b") == first
    second = keys.key_to("http://a")
    assert second != first
    keys.note(second, {REPLICA_HEADER: "http://a"})
    assert (keys.key_to("http://a"), keys.key_to("http://b")) == (second, first)
    keys.note(first, {REPLICA_HEADER: "http://a"})  # b is gone
    assert keys.replicas() == ["http://a"]
    assert keys.key_to("http://a") == first
    assert keys.key_to_most({"http://a": 1, "http://b": 9}, "other") == "other", "no key leads to it"
    assert keys.key_to_most({"http://a": 9, "http://b": 1}, "other") == first
    assert keys.key_to_most({"http://a": 0}, "other") == keys.key_to_most({}, "other") == "other"
    keys.note(first, {})  # not from a gateway
    assert keys.replicas() == []
    keys.note(routing_key([]), {REPLICA_HEADER: "http://a"})
    assert keys.replicas() == []
    assert keys.key_to_most({"http://a": 9}, "other") == "other", "without passages there is no key to learn"
