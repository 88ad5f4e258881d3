"""What a scheduler answers: plain JSON values, stable pages."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chunk_cache.index.quota import Shares
from chunk_cache.index.refresh import Origin, RefreshQueue
from chunk_cache.index.variant import NodeHome, PathHome, PathTokens, Variant, shown_id, variant_name
from chunk_cache.keys import DEFAULT_PARTITION, Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.options.config import Config
from sglang_chunk_cache.admin import scheduler_side as messages
from sglang_chunk_cache.admin.journal import Journal
from sglang_chunk_cache.admin.scheduler_side import ChunkAdmin
from sglang_chunk_cache.kv.ranks import of_one_rank
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.verification.gate import Gate

METRICS = GateMetrics(enabled=False, model="")


class Store:
    """Everything is stored; a node gives back its length."""

    def resolve(self, variant: Variant) -> int:
        return variant.length

    version = 0
    num_evicted_above = 0
    shares = Shares(64)
    transitions = None

    def node_id(self, variant: Variant) -> Any:
        return variant.holder.seen

    def locked_len(self, locks: Any) -> int:
        return sum(locks)

    def lock_chunk(self, variant: Variant) -> int:
        return variant.length

    def unlock(self, lock: int) -> None:
        pass

    def remove_node(self, home: NodeHome) -> int:
        return len(home.node_key)


@pytest.fixture
def admin() -> ChunkAdmin:
    return admin_of()


def admin_of(**config_fields: Any) -> ChunkAdmin:
    store = Store()
    config = Config(max_variants=9, max_variants_per_chunk=3, max_path_tokens=1000, **config_fields)
    manager = ChunkManager(config, store, method="epic", ratio=0.15)
    index = manager.index
    path = PathTokens(array("q", range(40)), Partition(), seen=7)
    index.add(key(1), length=10, start=5, generation=0, context=(), home=PathHome(path, 5))
    index.add(key(2), length=10, start=15, generation=0, context=(key(1),), home=PathHome(path, 15))
    index.add(
        key(1),
        length=10,
        start=20,
        generation=2,
        context=(key(2),),
        home=NodeHome(array("q", range(16)), "namespace", seen=8),
    )
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (np.int64(4160), np.int64(4160)))
    allocator = SimpleNamespace(size=64, page_size=1, available_size=lambda: 24, get_kvcache=lambda: pool)
    cache = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        evictable_size=lambda: np.int64(40),
        protected_size=lambda: 0,
    )
    return ChunkAdmin(cache, manager, store, None, None, None, Journal(), "torch", None)  # type: ignore[arg-type]


def key(i: int) -> bytes:
    return bytes([i]) * 16


def test_stats_are_plain_json(admin):
    stats = json.loads(json.dumps(admin.answer(messages.ChunkCacheStatsReq())))
    assert stats["tiers"] == {
        "pool": {
            "variants": 3,
            "tokens": 30,
            "bytes": 30 * 128,
            "capacity_tokens": 64,
            "capacity_bytes": 64 * 128,
            "free_tokens": 24,
            "evictable_tokens": 40,
            "protected_tokens": 0,
            "kept_tokens": 0,
            "share_evicted_tokens": 0,
        },
    }
    assert stats["index"]["num_variants"] == 3
    assert stats["partitions"] == {"variants": {"default": 3}, "path_tokens": {"default": 40}}
    assert stats["pins"]["max_tokens"] == 32


def test_stats_have_what_a_quota_counts_of_the_pool(admin):
    admin.store.shares = Shares(64, 0.5)
    admin.store.shares.add(DEFAULT_PARTITION, 33)
    found = json.loads(json.dumps(admin.answer(messages.ChunkCacheStatsReq())))["partitions"]
    assert (found["pool_tokens"], found["max_pool_tokens"]) == ({"default": 33}, 32)


@pytest.mark.parametrize("num_shown", [0, 3, 99])
def test_passages_are_shown_as_far_as_the_operator_lets_them(num_shown):
    admin = admin_of(shown_tokens=num_shown)
    requests = [{"chunks": [{"key": key(2).hex(), "id": "b"}, {"key": key(7).hex()}]}]
    admin.journal = SimpleNamespace(contents=lambda: {"requests": requests}, chunk_id=lambda key: None)
    (request,) = admin.answer(messages.ChunkCacheRequestsReq())["requests"]
    variants = admin.answer(messages.ChunkCacheVariantsReq())["variants"]
    if num_shown:
        assert [one["first_ids"] for one in variants] == [
            list(range(start, start + min(num_shown, 10))) for start in (5, 15, 0)
        ]
        assert request["chunks"] == [
            {"key": key(2).hex(), "id": "b", "first_ids": list(range(15, 15 + min(num_shown, 10)))},
            {"key": key(7).hex()},
        ]
    else:
        assert "first_ids" not in json.dumps([variants, request])
    assert requests[0]["chunks"][0] == {"key": key(2).hex(), "id": "b"}, "the journal keeps no tokens"


def test_pages_are_by_id(admin):
    def ids(**fields: Any) -> tuple[int, list[int]]:
        result = json.loads(json.dumps(admin.answer(messages.ChunkCacheVariantsReq(**fields))))
        numbers = [shown_id(i) for i in range(3)]
        return result["total"], [numbers.index(variant["id"]) for variant in result["variants"]]

    admin.index.touch(admin.index.get(0))
    assert ids() == (3, [0, 1, 2])
    assert ids(limit=2, offset=1) == (3, [1, 2])
    assert ids(offset=9) == (3, [])
    assert ids(key=key(1)) == (2, [0, 2])
    assert ids(key=key(5)) == (0, [])


def not_asking(keys: list[bytes], *, is_first: bool) -> bool:
    return False


def named(*numbers: int) -> dict[bytes, str]:
    """Names of these chunks as computed behind the first; chunk 2 is stored so."""
    return {key(number): variant_name(15, 0, False, b"", (key(1),)) for number in numbers}


def test_what_a_tier_has_is_stored_as_well(admin):
    asked = []
    lens = {key(3): 12}
    admin.tiers = SimpleNamespace(
        stored_lens=lambda names: asked.append(names) or lens,
        ask=lambda keys, *, is_first: asked.append((keys, is_first)) or is_first,
    )
    expected = {"stored": {key(2).hex(): 10, key(3).hex(): 12}}
    for is_again in (False, True):
        request = messages.ChunkCacheStoredReq(names=named(2, 3, 4), is_again=is_again)
        assert admin.answer(request) == {**expected, "is_asking": not is_again}
        asks = [named(3, 4), ([key(4)], not is_again)]
        assert asked[-2:] == asks, "what the pool has is not looked for, and what a tier is known to have not asked for"
    admin.tiers = None
    assert admin.answer(messages.ChunkCacheStoredReq(names=named(2, 3)))["stored"] == {key(2).hex(): 10}


def test_only_the_variant_that_is_meant_is_stored(admin):
    home = NodeHome(array("q", range(10)), "namespace", seen=9)
    admin.index.add(key(1), length=10, start=0, generation=1, context=(key(2), key(3)), home=home, is_prepared=True)
    name = variant_name(0, 1, True, b"", (key(2), key(3)))
    assert admin.answer(messages.ChunkCacheStoredReq(names={key(1): name}))["stored"] == {key(1).hex(): 10}
    admin.tiers = None
    other = messages.ChunkCacheStoredReq(names={key(1): variant_name(0, 1, True, b"", (key(3), key(2)))})
    assert admin.answer(other)["stored"] == {}, "another order is another computation"
    (described,) = [v for v in admin.answer(messages.ChunkCacheVariantsReq())["variants"] if v["neighbours"]]
    assert described["neighbours"] == [key(2).hex(), key(3).hex()]


def test_a_variant_is_described(admin):
    admin.answer(messages.ChunkCachePinReq(keys=[key(1)], until=12.5))
    admin.journal.chunk_id = {key(1): "Paris"}.get
    first, _, third = admin.answer(messages.ChunkCacheVariantsReq())["variants"]
    assert first == {
        "id": shown_id(0),
        "key": key(1).hex(),
        "chunk_id": "Paris",
        "length": 10,
        "start": 5,
        "generation": 0,
        "kind": "alone",
        "neighbours": None,
        "num_uses": 0,
        "reuse_frequency": 0.0,
        "cci": None,
        "where": {"tier": "pool", "home": "path", "node_id": 7},
        "stored_tokens": 10,
        "pinned_until": 12.5,
    }
    assert (third["where"]["home"], third["generation"], third["pinned_until"]) == ("node", 2, None)


def test_of_one_chunk_it_is_told_what_its_variants_were_computed_behind(admin):
    admin.tiers = SimpleNamespace(known=lambda name: {"disk": name[0]})
    found = json.loads(json.dumps(admin.answer(messages.ChunkCacheVariantsReq(key=key(1)))))
    assert [(one["system"], one["context"]) for one in found["variants"]] == [("", []), ("", [key(2).hex()])]
    assert (found["tiers"], found["reason"]) == ({"disk": 1}, "not_stored")
    admin.index.clear("weights_changed")
    assert admin.answer(messages.ChunkCacheVariantsReq(key=key(1)))["reason"] == "weights_changed"


def test_evict_forgets_all_variants_and_their_pins(admin):
    admin.answer(messages.ChunkCachePinReq(keys=[key(1), key(2)], until=12.5))
    evicted = admin.answer(messages.ChunkCacheEvictReq(keys=[key(1), key(9)]))["evicted"]
    assert evicted == {key(1).hex(): {"variants": 2, "freed_tokens": 16, "tiers": {}}}
    assert [variant.key for variant in admin.index] == [key(2)]
    assert len(admin.pins) == 1
    assert admin.answer(messages.ChunkCacheStoredReq(names=named(1, 2)))["stored"] == {key(2).hex(): 10}


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_idle_server_computes_nothing_evicted_again(everywhere):
    """What waits to be refreshed or verified is a prompt that may hold it."""
    admin = admin_of(refresh_uses=1)
    refresh, gate = RefreshQueue(admin.index, 1), Gate(1.0, None, METRICS, reduce_max=of_one_rank, state_file=None)
    admin._refresh, admin.gate, admin.cache.erase_unread = refresh, gate, lambda: 40
    for variant in list(admin.index):
        admin.index.touch(variant)
        refresh.note(variant, Origin(array("q", range(40)), ((5, 15),), Partition()))
    candidate = gate.queue.choose("r", array("q", range(40)), Partition(), method="epic", ratio=0.1, step=None)
    gate.queue.finish(candidate, array("q", [7]))
    admin.answer(messages.ChunkCacheEvictReq(keys=[key(1)], is_everywhere=everywhere))
    assert refresh.take() is None, "variant 2 was computed behind it"
    assert len(gate.queue) == (0 if everywhere else 1)


def test_a_flush_is_counted_and_drops_the_pins(admin):
    admin.answer(messages.ChunkCachePinReq(keys=[key(1)], until=12.5))
    admin.after_reset()
    assert (admin.num_flushes, len(admin.pins)) == (1, 0)
