"""Shares of the KV pool, on SGLang's own trees: who gives way when room is needed, and that the counts are right."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from chunk_cache.index.quota import Shares
from chunk_cache.keys import Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.options.config import Config
from sglang_chunk_cache.host.radix_cache import ChunkRadixCache
from sglang_chunk_cache.kv.store import VariantStore

CAPACITY = 400
QUIET, NOISY = Partition(), Partition("noisy", "salt")
CORES = pytest.mark.parametrize("core", ["python", "rust"])


class Tree:
    """A radix cache without a model, whose prompts are made of single tokens that nobody else has."""

    def __init__(self, core: str, share: float = 1.0) -> None:
        self.allocator = TokenToKVPoolAllocator(CAPACITY, torch.float32, "cpu", None, need_sort=False)
        params = CacheInitParams(
            False, None, self.allocator, 1, tree_components=(ComponentType.FULL,), tree_core_backend=core
        )
        self.cache: Any = ChunkRadixCache(params)
        self.store = VariantStore(self.cache, Shares(CAPACITY, share))
        manager = ChunkManager(Config(partition_share=share), self.store, method="epic", ratio=0.15)
        self.cache.chunks = SimpleNamespace(
            store=self.store,
            manager=manager,
            pool=SimpleNamespace(flush=lambda: None),
            admin=SimpleNamespace(pins=SimpleNamespace(renew=lambda: None)),
            tiers=None,
            partial_loads=None,
        )
        self.prompts: list[tuple[Partition, array[int]]] = []
        self._num_tokens = 0

    @property
    def shares(self) -> Shares:
        return self.store.shares

    def new(self, length: int) -> array[int]:
        self._num_tokens += length
        return array("q", range(self._num_tokens - length, self._num_tokens))

    def make_room(self, num_tokens: int) -> None:
        """As SGLang does before it allocates."""
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))

    def add(self, partition: Partition, tokens: array[int]) -> array[int]:
        """A prompt that was computed; room is made for all that is not there yet."""
        begin = self.match(partition, tokens)
        matched = begin.device_prefix_len
        lock = self.cache.lock(begin.last_device_node)
        self.make_room(len(tokens) - matched)
        new = self.allocator.alloc(len(tokens) - matched)
        slots = torch.cat([self.cache.path_device_indices(begin.last_device_node)[:matched], new])
        key = RadixKey(tokens, extra_key=partition.extra_key, cache_salt=partition.cache_salt)
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=matched))
        self.cache.unlock(lock)
        self.prompts.append((partition, tokens))
        return tokens

    def add_node(self, partition: Partition, length: int) -> Any:
        self.make_room(length)
        return self.store.insert_node(partition, self.new(length), self.allocator.alloc(length), priority=0)

    def match(self, partition: Partition, tokens: array[int]) -> Any:
        """As a use of them."""
        key = RadixKey(tokens, extra_key=partition.extra_key, cache_salt=partition.cache_salt)
        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def match_len(self, partition: Partition, tokens: array[int]) -> int:
        """Without a use."""
        key = RadixKey(tokens, extra_key=partition.extra_key, cache_salt=partition.cache_salt)
        return int(self.cache.tree_core.match_full_device_prefix(key)[0])

    def is_stored(self, partition: Partition, tokens: array[int]) -> bool:
        return self.match_len(partition, tokens) == len(tokens)


@CORES
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_who_floods_makes_room_out_of_its_own(core: str, share: float) -> None:
    tree = Tree(core, share)
    quiet = [tree.add(QUIET, tree.new(20)) for _ in range(8)]
    noisy = [tree.add(NOISY, tree.new(20)) for _ in range(40)]
    left = [tree.is_stored(QUIET, prompt) for prompt in quiet]
    assert all(left) if share < 1.0 else not any(left)
    if share < 1.0:
        of_noisy = [tree.is_stored(NOISY, prompt) for prompt in noisy]
        assert of_noisy == sorted(of_noisy), "the least recently used go first"
        assert tree.shares.held(NOISY.key) <= CAPACITY * share + 2 * 20
        assert tree.store.num_evicted_above == 40 * 20 - tree.shares.held(NOISY.key)


@CORES
def test_without_a_quota_the_tree_is_stocks(core: str) -> None:
    """The same calls leave the same tokens, and nothing is counted."""
    ours, stock = Tree(core), Tree(core)
    stock.cache.chunks = None
    for tree in (ours, stock):
        rng = random.Random(1)
        for _ in range(60):
            partition = rng.choice([QUIET, NOISY])
            if tree.prompts and rng.random() < 0.4:
                tree.match(*rng.choice(tree.prompts))
            tree.add(partition, tree.new(rng.randrange(1, 40)))
    left = [[tree.match_len(*prompt) for prompt in tree.prompts] for tree in (ours, stock)]
    assert left[0] == left[1]
    assert 0 < sum(left[0]) < sum(len(tokens) for _, tokens in ours.prompts)
    assert (len(ours.shares), ours.store.num_evicted_above) == (0, 0)


@CORES
def test_a_use_counts_within_a_partition(core: str) -> None:
    tree = Tree(core, 0.25)
    others = [(Partition(name), tree.new(90)) for name in "abc"]
    for other in others:
        tree.add(*other)
    first, second, third = (tree.add(NOISY, tree.new(40)) for _ in range(3))
    tree.match(NOISY, first)
    tree.make_room(20)
    left = [tree.is_stored(NOISY, prompt) for prompt in (first, second, third)]
    assert left == [True, False, True]
    assert all(tree.is_stored(*other) for other in others), "older, but not above their share"


@CORES
def test_what_is_in_use_stays(core: str) -> None:
    tree = Tree(core, 0.5)
    quiet = tree.add(QUIET, tree.new(100))
    held = tree.add(NOISY, tree.new(250))
    lock = tree.cache.lock(tree.match(NOISY, held).last_device_node)
    tree.make_room(100)
    assert tree.is_stored(NOISY, held)
    assert not tree.is_stored(QUIET, quiet), "nothing else could go"
    tree.cache.unlock(lock)
    tree.add(QUIET, tree.new(150))
    tree.make_room(20)
    assert not tree.is_stored(NOISY, held)


@CORES
def test_nodes_of_chunks_belong_to_their_partition(core: str) -> None:
    tree = Tree(core, 0.5)
    partitions = [QUIET, NOISY, Partition(""), Partition("noisy"), Partition(None, "salt")]
    homes = [tree.add_node(partition, 10 + i) for i, partition in enumerate(partitions)]
    assert [tree.shares.held(partition.key) for partition in partitions] == [10, 11, 12, 13, 14]
    assert tree.store.remove_node(homes[1]) == 11
    assert tree.shares.held(NOISY.key) == 0
    tree.cache.evict(EvictParams(num_tokens=CAPACITY))
    assert len(tree.shares) == 0


@CORES
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_tree(core: str, seed: int) -> None:
    """Prompts that begin alike, uses, locks, own nodes, evictions: what each partition has is what can be found."""
    tree, rng = Tree(core, 0.3), random.Random(seed)
    partitions = [QUIET, NOISY, Partition("third")]
    locks: list[Any] = []
    for _ in range(150):
        partition = rng.choice(partitions)
        begins = [tokens for owner, tokens in tree.prompts if owner == partition]
        head = rng.choice(begins)[: rng.randrange(1, 30)] if begins and rng.random() < 0.5 else array("q")
        tree.add(partition, head + tree.new(rng.randrange(1, 30)))
        if rng.random() < 0.3:
            locks.append(tree.cache.lock(tree.match(*rng.choice(tree.prompts[-5:])).last_device_node))
        while locks and (len(locks) > 3 or rng.random() < 0.2):
            tree.cache.unlock(locks.pop(rng.randrange(len(locks))))
        for owner in partitions:
            found = {tokens[:end].tobytes() for tokens, end in tree_prefixes(tree, owner)}
            assert tree.shares.held(owner.key) == len(found)
        tree.store.check_integrity(())
    assert tree.store.num_evicted_above > 0
    for lock in locks:
        tree.cache.unlock(lock)
    tree.cache.evict(EvictParams(num_tokens=CAPACITY))
    assert len(tree.shares) == 0
    assert tree.allocator.available_size() == CAPACITY


def tree_prefixes(tree: Tree, owner: Partition) -> list[tuple[array[int], int]]:
    """Each stored token of a partition once or more, as the prefix that it ends."""
    prompts = [tokens for partition, tokens in tree.prompts if partition == owner]
    return [(tokens, end + 1) for tokens in prompts for end in range(tree.match_len(owner, tokens))]
