"""VariantStore: where the KV of a variant lies in the radix tree, found again at every use.

Verbs: `resolve` (how much of a variant is still there), `slots` (its KV slots), `lock` / `unlock` (keep it while it is
read), `lock_chunk`, `locked_len`, `is_locked` (pins), `touch` (it was used), `path` (an exact prompt in the tree),
`insert_node` (a chunk becomes a node of its own), `remove_node` (such a node gives its slots back), `insert` and
`evict_leaf` (SGLang's, counted by partition), `evict_above` (partitions above their share give way).

Promises: the tree owns every slot; nothing here outlives an eviction. Where a path or node was last seen is only a
hint: SGLang never reuses an id, the tokens in front of a node never change, and a node that is gone makes the lookup
fall back to matching the tokens, so an evicted variant is simply a shorter match. The hint also says how much of the
node's path is the variant's: matching may find the node of another prompt that only begins alike.
`resolve` changes nothing in the tree: it neither splits a node nor counts as a use.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from chunk_cache.index.quota import Shares
from chunk_cache.index.transition_store import TransitionStore
from chunk_cache.index.variant import NodeHome, PathTokens, Variant, usable_len
from chunk_cache.keys import Partition
from sglang_chunk_cache.kv.transition import Transition

if TYPE_CHECKING:
    import torch


_PADDING_TOKEN = 0


@dataclass(slots=True)
class _Seen:
    """Where a path or node was last seen.

    Attributes:
        node_id: the tree node that it ends in, or once did.
        num_shared: tokens up to that node's end that are its own; None = all.
    """

    node_id: int
    num_shared: int | None = None


class VariantStore:
    """View of one radix tree as a store of chunk variants.

    Where a model drafts from hidden states (EAGLE), SGLang's tree knows pairs of tokens: a slot is found by its token
    and the one behind it, so a key has one token more than slots.

    Args:
        tree: SGLang's cache; methods that we override are called as SGLang has them, so nothing here calls us back.
        shares: tokens that each partition has in the tree; counted here where they are limited.
    """

    def __init__(self, tree: Any, shares: Shares) -> None:
        self._tree = tree
        self.shares = shares
        self.num_evicted_above = 0
        """Tokens that went because their partition was above its share."""
        self._num_behind = int(tree.tree_core.is_eagle)
        self.transitions: TransitionStore[Transition] | None = None
        """Transitions of variants; a variant without one counts as gone. None = the model has no states."""
        # A secret, so that no client can name one of our nodes through its own extra_key.
        self._secret = secrets.token_hex(8)
        self._num_namespaces = 0
        self.version = 0
        """A number that changes whenever an answer of `resolve` may have changed."""
        self._lens: dict[int, int | None] = {}  # of paths up to a node, at this version

    def note_change(self) -> None:
        """Notes that the tree has gained or lost tokens."""
        self.version += 1
        self._lens.clear()

    def resolve(self, variant: Variant) -> int:
        """Leading tokens of the chunk whose KV is still in the tree and of use (`usable_len`)."""
        if self.transitions is not None and variant.variant_id not in self.transitions:
            return 0
        start = variant.path_start
        available = self._available_len(variant, start + variant.length)
        return usable_len(max(0, min(available - start, variant.length)), variant.length)

    def node_id(self, variant: Variant) -> int:
        """The node where a variant was last seen."""
        return _seen(variant).node_id

    def slots(self, variant: Variant, offset: int, length: int) -> torch.Tensor:
        """KV slots of the chunk's tokens `[offset, offset + length)`, int64 on the device; `resolve` came before."""
        path, (start,) = self.path_slots([variant])
        assert start + offset + length <= len(path), (start, offset, length, len(path))
        return path[start + offset : start + offset + length]

    def path_slots(self, variants: Sequence[Variant]) -> tuple[torch.Tensor, list[int]]:
        """KV slots, as those of `slots`, of the path that variants of one node lie in, and where in it each begins."""
        return self._tree.path_device_indices(self.node_id(variants[0])), [one.path_start for one in variants]

    def lock(self, variant: Variant) -> Any:
        """Keeps the variant from eviction until `unlock`; `resolve` came before."""
        return self._lock(self.node_id(variant))

    def _lock(self, node_id: int) -> Any:
        """Locks KV alone: SGLang may evict the states that a prompt left."""
        skipped = () if self.transitions is None else (ComponentType.MAMBA,)
        return self._tree.lock(node_id, skip_lock_components=skipped)

    def unlock(self, lock: Any) -> None:
        self._tree.unlock(lock)

    def lock_chunk(self, variant: Variant) -> Any:
        """Locks a chunk but not what lies behind it in its path, in whole pages; `resolve` came before."""
        if self.transitions is not None:
            return self._lock(self.node_id(variant))  # matches end where a state is
        end = variant.path_start + self.resolve(variant)
        page_size = self._tree.page_size
        match = UnifiedRadixCache.match_prefix(
            self._tree, MatchPrefixParams(key=self._radix_key(variant, -(-end // page_size) * page_size))
        )
        found_all = match.device_prefix_len >= end
        return self._tree.lock(match.last_device_node if found_all else self.node_id(variant))

    def locked_len(self, locks: Iterable[Any]) -> int:
        """Tokens of the pool that these locks keep, each counted once."""
        paths = self._tree.tree_core.collect_path_info([lock.node for lock in locks])
        return sum({node.node_id: node.path_end - node.path_start for path in paths for node in path}.values())

    def is_locked(self, node_id: int) -> bool:
        """Whether anybody keeps this node from eviction; found by a lock, as neither of SGLang's tree cores can say."""
        before = self._tree.protected_size()
        lock = self._tree.lock(node_id)
        after = self._tree.protected_size()
        self._tree.unlock(lock)
        return bool(after == before)

    def touch(self, variant: Variant, priority: int | None = None) -> None:
        """Makes the variant the most recently used one of the tree.

        Args:
            priority: raises the eviction priority of its nodes, and of those in front of them, to this; None = not.
        """
        if priority is None:
            self._tree.touch_prefix(self._radix_key(variant))
            return
        # Inserting what is there stores nothing and raises priorities; by `prev_prefix_len` nothing is freed either.
        end = variant.path_start + self.resolve(variant)
        slots = self._tree.path_device_indices(self.node_id(variant))[:end]
        key = self._radix_key(variant, len(slots))
        UnifiedRadixCache.insert(
            self._tree, InsertParams(key=key, value=slots, prev_prefix_len=len(slots), priority=priority)
        )

    def path(self, token_ids: array[int], length: int, partition: Partition, node_id: int) -> PathTokens:
        """The first `length` tokens of an exact prompt, which ends in a node of the tree."""
        return PathTokens(token_ids[: length + self._num_behind], partition, _Seen(node_id))

    def insert_node(self, partition: Partition, token_ids: array[int], slots: torch.Tensor, priority: int) -> NodeHome:
        """Hands `slots` (int64, whole pages) to the tree as a node of its own.

        Args:
            token_ids: the chunk; padded here to the length of `slots`.
            priority: for eviction.
        """
        num_padding = len(slots) + self._num_behind - len(token_ids)
        node_key = token_ids + array("q", [_PADDING_TOKEN]) * num_padding
        self._num_namespaces += 1
        namespace = f"{self._secret}\x1f{partition.key.hex()}\x1f{self._num_namespaces}"
        result = self.insert(InsertParams(key=RadixKey(node_key, extra_key=namespace), value=slots, priority=priority))
        assert result.prefix_len == 0, "a namespace of ours is never used twice"
        return NodeHome(node_key, namespace, _Seen(result.last_device_node), partition=partition)

    def remove_node(self, home: NodeHome) -> int:
        """Gives back the slots of a chunk's own node, which no variant needs any more.

        Returns:
            Tokens that were freed: 0 if the node is gone already, and fewer than it had if somebody reads it.
        """
        key = RadixKey(home.node_key, extra_key=home.namespace)
        _, node_id, _ = self._tree.tree_core.match_full_device_prefix(key)
        (path,) = self._tree.tree_core.collect_path_info([node_id])
        freed = dict.fromkeys(self._tree.tree_components, 0)
        for node in reversed(path):  # more than one where it was split
            if self.is_locked(node.node_id):
                break
            self.evict_leaf(node.node_id, freed)
        self.note_change()
        return sum(freed.values())

    # What each partition has.

    def insert(self, params: InsertParams) -> InsertResult:
        """Inserts as SGLang does, and counts what is new."""
        if not self.shares.is_limited:
            return UnifiedRadixCache.insert(self._tree, params)
        before = self._num_tokens()
        result = UnifiedRadixCache.insert(self._tree, params)
        self.shares.add(self._owner(params.key.extra_key, params.key.cache_salt), self._num_tokens() - before)
        return result

    def evict_leaf(self, node_id: int, tracker: dict[ComponentType, int]) -> Any:
        """Evicts as SGLang does, and counts what goes."""
        if not self.shares.is_limited:
            return UnifiedRadixCache._evict_device_leaf(self._tree, node_id, tracker)
        owner, before = self._owner_of(node_id), self._num_tokens()
        backup = UnifiedRadixCache._evict_device_leaf(self._tree, node_id, tracker)
        self.shares.remove(owner, before - self._num_tokens())
        return backup

    def evict_above(self, num_tokens: int, tracker: dict[ComponentType, int]) -> None:
        """Evicts from partitions above their share, in the tree's order; spares one that is down to `Shares.least`.

        Args:
            num_tokens: for which room is needed; fewer go if leaves are in use.
            tracker: counts what goes, as SGLang's walk does.
        """
        num_wanted = self.shares.num_to_give(num_tokens)
        if not num_wanted:
            return
        kind, core, before = ComponentType.FULL, self._tree.tree_core, self._num_tokens()
        above = set(self.shares.above)
        core.evict_device_start(kind, core.full_evictable_size())
        try:
            while above and self._num_tokens() > before - num_wanted:
                node_id, _ = self._tree._evict_device_next_node(kind, tracker)
                if node_id is None:
                    break
                owner = self._owner_of(node_id)
                if owner in above:
                    self.evict_leaf(node_id, tracker)
                    if self.shares.held(owner) <= self.shares.least:
                        above.remove(owner)
        finally:
            core.evict_device_end(kind)
        self.num_evicted_above += before - self._num_tokens()

    def _num_tokens(self) -> int:
        core = self._tree.tree_core
        return int(core.full_evictable_size() + core.full_protected_size())

    def _owner_of(self, node_id: int) -> bytes:
        return self._owner(*self._tree.tree_core.prefetch_anchor_info(node_id))

    def _owner(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """`Partition.key` of what lies under these in the tree; a namespace of ours names it."""
        if extra_key is not None and extra_key.startswith(self._secret):
            return bytes.fromhex(extra_key.split("\x1f")[1])
        return Partition(extra_key, cache_salt).key

    def check_integrity(self, variants: Iterable[Variant]) -> None:
        """Compares what `resolve` says with a match of the tokens, which uses no hint.

        Raises:
            AssertionError: tokens of another prompt would be taken for a chunk's, or some are not counted.
        """
        if self.shares.is_limited:
            counted = self.shares.total
            assert counted == self._num_tokens(), f"partitions have {counted} tokens, the tree {self._num_tokens()}"
        for variant in variants:
            key, page_size = self._radix_key(variant), self._tree.page_size
            matched, _, _ = self._tree.tree_core.match_full_device_prefix(key)
            if matched == len(key) // page_size * page_size:
                matched = len(key)  # the hint also knows the rest of the last page
            covered_len = self.resolve(variant)
            assert covered_len <= max(0, matched - variant.path_start), (variant, covered_len, matched)

    def _available_len(self, variant: Variant, wanted: int) -> int:
        seen = _seen(variant)
        available = self._len_of_node(seen.node_id)
        if available is not None:
            shared = available if seen.num_shared is None else min(available, seen.num_shared)
            if shared >= wanted:
                return shared
        available, seen.node_id, _ = self._tree.tree_core.match_full_device_prefix(self._radix_key(variant))
        seen.num_shared = available
        return available

    def _len_of_node(self, node_id: int) -> int | None:
        if node_id not in self._lens:
            try:
                (path,) = self._tree.tree_core.collect_path_info([node_id])
            except KeyError:
                path = ()  # evicted
            is_stored = bool(path) and path[-1].full_value_len is not None
            self._lens[node_id] = path[-1].path_end if is_stored else None
        return self._lens[node_id]

    def _radix_key(self, variant: Variant, length: int | None = None) -> RadixKey:
        holder = variant.holder
        end = None if length is None else length + self._num_behind
        if isinstance(holder, PathTokens):
            partition = holder.partition
            return RadixKey(holder.tokens[:end], extra_key=partition.extra_key, cache_salt=partition.cache_salt)
        return RadixKey(holder.node_key[:end], extra_key=holder.namespace)


def _seen(variant: Variant) -> _Seen:
    seen = variant.holder.seen
    assert isinstance(seen, _Seen), f"{variant} is not in this store"
    return seen
