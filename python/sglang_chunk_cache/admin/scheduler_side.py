"""ChunkAdmin: administration in one scheduler process.

Verbs: `answer` (one of the requests below; `host/admin_requests.py` brings them here), `is_pinned`, `after_reset`
(called by the radix cache) and `after_forgetting` (called when the weights have changed).

Requests travel as SGLang's own control requests do: over its sockets, to every scheduler process, one reply from rank
0. All fields are numbers, bytes, text and containers of these, so both transports of SGLang carry them
(`SGLANG_USE_PICKLE_IPC` 0 and 1). From clients they hold only checked numbers and keys. Importing this module makes
them known to SGLang's decoder in this process.

Promises: every rank of a tensor-parallel group gets every request in the same step of its event loop, and answers it
from equal state, so all do the same; the answers are compared. Nothing here waits for a clock, a file or a client. What
is evicted here leaves the tiers below the pool too, as soon as their workers get to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from chunk_cache.index.pins import MAX_PINNED_SHARE, Pins, variants_of
from chunk_cache.index.variant import NodeHome, PathTokens, Variant, shown_id
from chunk_cache.keys import chunks_among
from sglang_chunk_cache.admin.journal import Journal

if TYPE_CHECKING:
    from chunk_cache.index.refresh import RefreshQueue
    from chunk_cache.manager import ChunkManager
    from chunk_cache.prompt.discover import Discoverer
    from sglang_chunk_cache.kv.store import VariantStore
    from sglang_chunk_cache.tiers.manager import ChunkTiers
    from sglang_chunk_cache.verification.gate import Gate

Result: TypeAlias = dict[str, Any]


class ChunkCacheStatsReq(BaseReq, kw_only=True):
    """Counters and sizes of every rank."""


class ChunkCacheRequestsReq(BaseReq, kw_only=True):
    """What became of the latest requests, as rank 0 knows it."""


class ChunkCacheVariantsReq(BaseReq, kw_only=True):
    """Variants: `limit` of them, after the first `offset`; of one chunk where `key` is given; by id, or by uses."""

    key: bytes | None = None
    limit: int = 100
    offset: int = 0
    by_uses: bool = False


class ChunkCacheStoredReq(BaseReq, kw_only=True):
    """Which of these variants are stored, in the KV pool or in a tier below it."""

    names: dict[bytes, str]
    """The name of one variant of each chunk (`variant_name`), by the chunk's key."""
    is_again: bool = False
    """Whether a store was asked already for those that are not known to be stored."""


class ChunkCachePinReq(BaseReq, kw_only=True):
    """Keep these chunks. `until` identifies the pin's end, the same number on all ranks; no scheduler reads a clock."""

    keys: list[bytes]
    until: float


class ChunkCacheUnpinReq(BaseReq, kw_only=True):
    """Let go of these chunks, of those whose end is `until` or earlier, or, with neither, of all."""

    keys: list[bytes] | None = None
    until: float | None = None


class ChunkCacheEvictReq(BaseReq, kw_only=True):
    """Forget these chunks; if `is_everywhere`, also all that was computed behind them, and overwrite what is freed."""

    keys: list[bytes]
    is_everywhere: bool = False


class ChunkCacheAdminReply(BaseReq, kw_only=True):
    """The answer to any of these requests.

    `ranks` has the result of every tensor-parallel rank for `ChunkCacheStatsReq`, otherwise that of rank 0. Except for
    `ChunkCacheRequestsReq` all other ranks must have the same: `agree` says whether they do. `dp_rank` is the replica.
    """

    ranks: list[dict[str, Any]]
    agree: bool = True
    dp_rank: int = 0


class ChunkAdmin:
    """See the head of this file.

    Args:
        cache: the radix cache of this process; for its sizes.
        tiers: below the KV pool; None = there are none.
        gate: verifies replies; None = nobody does.
        discoverer: finds passages that nobody marked; None = nobody does.
        journal: what became of requests.
        kernel: backend of our kernels.
        refresh: computes popular variants anew; None = nobody does.
    """

    def __init__(
        self,
        cache: Any,
        manager: ChunkManager,
        store: VariantStore,
        tiers: ChunkTiers | None,
        gate: Gate | None,
        discoverer: Discoverer | None,
        journal: Journal,
        kernel: str,
        refresh: RefreshQueue | None,
    ) -> None:
        self.cache = cache
        self.manager = manager
        self.index = index = manager.index
        self.store = store
        self.tiers = tiers
        self.gate = gate
        self.discoverer = discoverer
        self.journal = journal
        self.kernel = kernel
        self._refresh = refresh
        self._num_shown = manager.config.shown_tokens
        self.num_flushes = 0
        self.num_due = 0  # tokens that a prompt which is computed in steps still needs, when a request is answered
        self.has_pool = True  # False while the pool's memory is given away (`/release_memory_occupation`)
        max_pinned = int(MAX_PINNED_SHARE * cache.token_to_kv_pool_allocator.size)
        self.pins = Pins(index, store, max_pinned, is_trust_limited=manager.config.is_trust_limited)

    def answer(self, request: Any) -> Result:
        """The result of one request."""
        return _HANDLERS[type(request)](self, request)

    def is_pinned(self, variant_id: int) -> bool:
        """Whether the variant with this id is pinned."""
        variant = self.index.get(variant_id)
        return variant is not None and self.pins.until(variant) is not None

    def after_reset(self) -> None:
        """The cache was flushed."""
        self.num_flushes += 1
        self.pins.forget_all()

    def after_forgetting(self) -> None:
        """The index has forgotten all chunks, as after a flush, but the tree still has its nodes."""
        self.num_flushes += 1
        self.pins.renew()

    def _stats(self, _request: ChunkCacheStatsReq) -> Result:
        below = self.tiers.stats() if self.tiers is not None else {"tiers": {}}
        return {
            "index": self.index.stats(),
            "partitions": self._partitions(),
            **below,
            "tiers": {"pool": pool_stats(self), **below["tiers"]},
            "pins": self.pins.stats(),
            "kernel": self.kernel,
            "num_flushes": self.num_flushes,
            **({} if self.gate is None else {"gate": self.gate.stats()}),
            **({} if self.discoverer is None else {"discover": self.discoverer.stats()}),
        }

    def _partitions(self) -> Result:
        """What the largest partitions have, by name; tokens in the pool only where `partition_share` limits them."""
        shares = self.store.shares
        pool = {"pool_tokens": shares.largest(), "max_pool_tokens": shares.most} if shares.is_limited else {}
        return pool | self.index.quota.largest()

    def _requests(self, _request: ChunkCacheRequestsReq) -> Result:
        contents = self.journal.contents()
        if self._num_shown:
            contents["requests"] = [
                {**one, "chunks": [self._with_beginning(chunk) for chunk in one["chunks"]]}
                for one in contents["requests"]
            ]
        return contents

    def _with_beginning(self, chunk: Result) -> Result:
        """A chunk of a reply, with its first tokens where it is still stored."""
        variants = self.index.variants_of(bytes.fromhex(chunk["key"]))
        return {**chunk, **self._beginning(variants[0])} if variants else chunk

    def _beginning(self, variant: Variant) -> Result:
        """The first tokens of a variant, as many as the operator lets people see (`shown_tokens`)."""
        return {"first_ids": variant.token_ids[: self._num_shown].tolist()} if self._num_shown else {}

    def _variants(self, request: ChunkCacheVariantsReq) -> Result:
        found = list(self.index) if request.key is None else self.index.variants_of(request.key)
        found.sort(key=lambda variant: (-variant.num_uses if request.by_uses else 0, variant.variant_id))
        page = found[request.offset : request.offset + request.limit]
        if request.key is None:
            return {"total": len(found), "variants": [self._describe(variant) for variant in page]}
        return {
            "total": len(found),
            "variants": [{**self._describe(variant), **_behind(variant)} for variant in page],
            "tiers": {} if self.tiers is None else self.tiers.known(request.key),
            "reason": self.index.why_gone(request.key),
        }

    def _describe(self, variant: Variant) -> Result:
        is_path = isinstance(variant.holder, PathTokens)
        stored_tokens = self.store.resolve(variant)
        return {
            "id": shown_id(variant.variant_id),
            "key": variant.key.hex(),
            "chunk_id": self.journal.chunk_id(variant.key),
            "length": variant.length,
            **self._beginning(variant),
            "start": variant.start,
            "generation": variant.generation,
            "kind": variant.kind,
            "neighbours": [key.hex() for key in chunks_among(variant.context)] if variant.is_prepared else None,
            "num_uses": variant.num_uses,
            "reuse_frequency": float(variant.reuse_frequency),
            "cci": None if variant.statistics is None else float(variant.statistics.cci),
            "where": {
                "tier": "pool",
                "home": "path" if is_path else "node",
                "node_id": self.store.node_id(variant) if stored_tokens else None,
            },
            "stored_tokens": stored_tokens,
            "pinned_until": self.pins.until(variant),
        }

    def _stored(self, request: ChunkCacheStoredReq) -> Result:
        stored, names = {}, request.names
        for key, variants in variants_of(self.index, list(names)).items():
            num_tokens = max((self.store.resolve(one) for one in variants if one.name == names[key]), default=0)
            if num_tokens:
                stored[key] = num_tokens
        if self.tiers is not None:
            stored |= self.tiers.stored_lens({key: name for key, name in names.items() if key not in stored})
        missing = [key for key in names if key not in stored]
        return {
            "stored": {key.hex(): num_tokens for key, num_tokens in stored.items()},
            "is_asking": self.tiers is not None and self.tiers.ask(missing, is_first=not request.is_again),
        }

    def _pin(self, request: ChunkCachePinReq) -> Result:
        result = self.pins.pin(request.keys, request.until, self._has_room)
        return {
            "pinned": {key.hex(): num_tokens for key, num_tokens in result.pinned.items()},
            "is_refused": result.is_refused,
            "pinned_tokens": result.num_tokens,
            "max_pinned_tokens": self.pins.max_tokens,
        }

    def _has_room(self) -> bool:
        """Whether the prompt that is computed in steps still gets its memory: a scheduler cannot stop in its midst."""
        num_free = self.cache.token_to_kv_pool_allocator.available_size() + int(self.cache.evictable_size())
        return num_free >= self.num_due

    def _unpin(self, request: ChunkCacheUnpinReq) -> Result:
        keys = self.pins.unpin(request.keys) if request.until is None else self.pins.expire(request.until)
        return {"unpinned": [key.hex() for key in keys], "pinned_tokens": self.pins.num_tokens}

    def _evict(self, request: ChunkCacheEvictReq) -> Result:
        keys = request.keys
        if request.is_everywhere and self.discoverer is not None:
            keys = list(dict.fromkeys((*keys, *(found for key in keys for found in self.discoverer.sharing(key)))))
        self.pins.unpin(keys)
        more = self._evict_behind(keys) if request.is_everywhere else {}
        if self._refresh is not None:
            self._refresh.forget(keys)
        below = {} if self.tiers is None else self.tiers.evict(keys)
        evicted = {}
        for key in keys:
            self.journal.forget_chunk_id(key)
            if self.discoverer is not None:
                self.discoverer.forget(key)
            variants, tiers = self.index.variants_of(key), below.get(key, {})
            if variants or tiers:
                num_freed = sum(self._forget(variant) for variant in variants)
                evicted[key.hex()] = {"variants": len(variants), "freed_tokens": num_freed, "tiers": tiers}
        return {"evicted": evicted} | more | (self._empty_pool() if request.is_everywhere else {})

    def _evict_behind(self, keys: Sequence[bytes]) -> Result:
        """Forgets what was computed behind these chunks; derived KV also in front of them, where `drift` may have
        brought something of theirs."""
        gone = set(keys)
        behind = [one for one in self.index if not gone.isdisjoint(one.prompt_keys if one.generation else one.context)]
        self.pins.unpin(dict.fromkeys(variant.key for variant in behind))
        num_freed = sum(self._forget(variant) for variant in behind)
        if self.tiers is not None:
            self.tiers.evict_behind(gone)
        return {"behind": {"variants": len(behind), "freed_tokens": num_freed}}

    def _empty_pool(self) -> Result:
        """Evicts all unread, unpinned KV and overwrites free slots, since any prompt may hold what was forgotten; also
        those that an idle server would compute again."""
        if self._refresh is not None:
            self._refresh.clear()
        if self.gate is not None:
            self.gate.drop_replies("evicted")
        num_emptied = self.cache.erase_unread() if self.has_pool else 0  # SGLang has emptied a pool that is away
        allocator = self.cache.token_to_kv_pool_allocator
        in_use = allocator.size - allocator.available_size() - self.pins.num_tokens
        return {"emptied_tokens": num_emptied, "in_use_tokens": int(in_use)}

    def _forget(self, variant: Variant) -> int:
        """Forgets a variant; returns the number of tokens of the pool that this frees."""
        holder = variant.holder
        self.index.discard(variant.variant_id)
        return self.store.remove_node(holder) if isinstance(holder, NodeHome) else 0


def _behind(variant: Variant) -> Result:
    """What a variant was computed behind, as hashes, which do not reveal it."""
    return {"system": variant.system.hex(), "context": [key.hex() for key in variant.context]}


_HANDLERS: dict[type, Callable[[ChunkAdmin, Any], Result]] = {
    ChunkCacheStatsReq: ChunkAdmin._stats,
    ChunkCacheRequestsReq: ChunkAdmin._requests,
    ChunkCacheVariantsReq: ChunkAdmin._variants,
    ChunkCacheStoredReq: ChunkAdmin._stored,
    ChunkCachePinReq: ChunkAdmin._pin,
    ChunkCacheUnpinReq: ChunkAdmin._unpin,
    ChunkCacheEvictReq: ChunkAdmin._evict,
}
REQUESTS = tuple(_HANDLERS)
hook_custom_types(*REQUESTS, ChunkCacheAdminReply)


def pool_stats(admin: ChunkAdmin) -> dict[str, int]:
    """The KV pool of this rank.

    `variants` and `tokens` are what the index remembers: what was evicted a moment ago still counts, and tokens that
    two variants share count twice.
    """
    allocator = admin.cache.token_to_kv_pool_allocator
    tokens = sum(variant.length for variant in admin.index)
    pool_bytes = allocator.get_kvcache().get_kv_size_bytes()
    pool_bytes = sum(pool_bytes) if isinstance(pool_bytes, tuple) else pool_bytes
    bytes_per_token = pool_bytes // (allocator.size + allocator.page_size)  # one page is for padding
    numbers = {
        "variants": len(admin.index),
        "tokens": tokens,
        "bytes": tokens * bytes_per_token,
        "capacity_tokens": allocator.size,
        "capacity_bytes": allocator.size * bytes_per_token,
        "free_tokens": allocator.available_size(),
        "evictable_tokens": admin.cache.evictable_size(),
        "protected_tokens": admin.cache.protected_size(),
        "kept_tokens": admin.manager.num_kept_tokens(allocator.size),
        "share_evicted_tokens": admin.store.num_evicted_above,
    }
    transitions = admin.store.transitions
    if transitions is not None:
        numbers |= {"state_variants": len(transitions), "state_bytes": transitions.num_bytes}
    return {name: int(number) for name, number in numbers.items()}  # SGLang's sizes may be numpy's numbers
