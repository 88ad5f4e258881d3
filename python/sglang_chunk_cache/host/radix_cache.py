"""ChunkRadixCache: SGLang's radix tree that also finds, loads and remembers text chunks.

Verbs (all called by SGLang): `match_prefix` (exact prefix, then a plan for the chunks behind it), `init_load_back`
(fill private slots from the plan), `checkpoint` (remember chunks; keep approximate KV out), `free_kv_row` (give back
what did not become a node), `on_release`, `reset`.

Promises: KV of a fused request is never inserted under its exact prefix; its private slots are freed with it, or
change owner to a node of their own, never both; a load brings all it promised or nothing. Sources are protected from
eviction while a load allocates, and only then: the copy is enqueued before `init_load_back` returns, and whoever gets
a source slot next writes to it on the same stream, later.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from chunk_cache.config import Config, describe
from chunk_cache.index import ChunkIndex, Lookup
from chunk_cache.keys import Partition
from chunk_cache.methods import METHODS, Method, Ranking
from chunk_cache.plan import ChunkPlan, RecomputePlan, make_plan, replan_without_load
from chunk_cache.reusability import use_weight
from chunk_cache.variant import PathHome, PathTokens, Variant
from sgl_kernel_ext.backend import resolve_backend
from sglang_chunk_cache.admin.scheduler_side import ChunkAdmin
from sglang_chunk_cache.host import hooks
from sglang_chunk_cache.host.prefill_adder import complete_report, correct_report
from sglang_chunk_cache.kv.assembler import HostKV, KVAssembler
from sglang_chunk_cache.kv.store import VariantStore
from sglang_chunk_cache.maintenance import Maintenance
from sglang_chunk_cache.metrics import ChunkMetrics
from sglang_chunk_cache.request_state import DocChunkRequest, state_of
from sglang_chunk_cache.server_args import ChunkCacheArgs, get_args, refuse
from sglang_chunk_cache.tiers.base import StoredVariant, TierError
from sglang_chunk_cache.tiers.landing import Landings, LayerCopy
from sglang_chunk_cache.tiers.manager import ChunkTiers, create_tiers

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        EvictResult,
        InitLoadBackParams,
        InsertParams,
        InsertResult,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_chunk_cache.tiers.stream import LayerStream

logger = logging.getLogger(__name__)

Ranges = list[tuple[int, int]]

ROOM_PER_REUSED = 4
"""Tokens of room for each that was reused: between two uses of a chunk others come by, some to be used again."""


def create(ctx: TreeCacheBuildContext) -> ChunkRadixCache:
    """Factory of `--radix-cache-backend chunk_cache`.

    Raises:
        StartRefused: a hook is missing in this process, or the model's rotation is not supported.
    """
    hooks.verify_hooks()
    args = get_args()
    if args is None:
        refuse("the radix cache backend chunk_cache is chosen by --chunk-cache, not by --radix-cache-backend.")
    cache = create_unified_radix_cache(ctx, cache_class=ChunkRadixCache)
    assert isinstance(cache, ChunkRadixCache)
    cache.init_chunks(args, ctx)
    return cache


class ChunkRadixCache(UnifiedRadixCache):
    """See the head of this file."""

    _index: ChunkIndex | None = None
    tiers: ChunkTiers | None = None
    landings: Landings | None = None

    def init_chunks(self, args: ChunkCacheArgs, ctx: TreeCacheBuildContext) -> None:
        """Second half of the construction, once the base class has built the tree."""
        self._args = args
        self.chunk_config: Config = args.parsed_config
        self._store = VariantStore(self)
        model_runner = ctx.tp_worker.model_runner
        device = torch.device(model_runner.device)
        self.kernel = resolve_backend(self.chunk_config.kernel, device, has_flashinfer=True)
        self._assembler = KVAssembler(model_runner, self.token_to_kv_pool_allocator.get_kvcache(), self.kernel)
        self._index = ChunkIndex(
            max_variants=self.chunk_config.max_variants,
            max_variants_per_chunk=self.chunk_config.max_variants_per_chunk,
            max_path_tokens=self.chunk_config.max_path_tokens,
            eviction=self.chunk_config.eviction,
            ageing=self.chunk_config.ageing,
        )
        self._is_by_frequency = self.chunk_config.eviction == "frequency-reuse"
        self._handed_over: dict[int, Ranges] = {}  # request row -> ranges that became nodes
        self.chunk_metrics = ChunkMetrics(enabled=self._enable_metrics_flag and ctx.tp_rank == 0)
        self.maintenance = Maintenance(
            self.chunk_config,
            self._index,
            self._store,
            self._assembler,
            self.chunk_metrics,
            self._allocate,
        )
        self.admin = ChunkAdmin(self, self._index, self._store)
        self.tiers = self._create_tiers(ctx)
        logger.info(
            "Chunk cache: method %s, ratio %s, separator %r, kernels %s, %s",
            args.method,
            args.ratio,
            args.separator,
            self.kernel,
            describe(self.chunk_config),
        )

    def check_integrity(self) -> None:
        """Recomputes the index from scratch.

        Raises:
            AssertionError: it does not fit itself or the tree, or a request that is gone left something behind.
        """
        assert self._index is not None
        self._index.check_integrity(self._store.resolve)
        self._store.check_integrity(self._index)
        self.admin.check_integrity()

    @property
    def num_kept_tokens(self) -> int:
        """That running requests leave to stored chunks: by how much is reused, at most a share of the pool."""
        assert self._index is not None
        most = int(self.chunk_config.keep_share * self.token_to_kv_pool_allocator.size)
        return min(most, ROOM_PER_REUSED * self._index.num_reused_tokens)

    # Lookup.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        state = None if params.req is None else state_of(params.req)
        if state is None:
            return result
        if state.options.spans and state.options.spans[-1][1] > len(params.req.origin_input_ids):
            state.plan = None  # SGLang replaced the prompt of a request that it is about to abort
            return result
        state.plan = self._plan(params.req, state, prefix_len=result.device_prefix_len, max_prefix_len=len(params.key))
        return result._replace(host_hit_length=state.load_len)

    def _plan(self, req: Req, state: DocChunkRequest, *, prefix_len: int, max_prefix_len: int) -> RecomputePlan:
        lookups: list[Lookup | None] = [None] * len(state.keys)
        if state.options.mode != "off":
            for i, (_, end) in enumerate(state.options.spans):
                if end > prefix_len:
                    lookups[i] = self._lookup_below(state.keys[i], state.keys[:i], state)
        method = METHODS[state.options.method or self._args.method]
        plan = make_plan(
            opts=state.options,
            default_method=self._args.method,
            default_ratio=self._args.ratio
            if state.options.names_method
            else self._ratio_that_hides(lookups, num_keys=len(req.origin_input_ids)),
            prompt_len=len(req.origin_input_ids) + len(req.output_ids),
            prefix_len=prefix_len,
            max_prefix_len=max_prefix_len,
            page_size=self.page_size,
            lookups=lookups,
            min_reuse_len=self.chunk_config.min_reuse_len,
            chunk_keys=state.keys,
            rankings=_rankings(method, lookups),
            alpha=self.chunk_config.alpha,
            max_cfo=self.chunk_config.max_cfo,
            limit_reason="logprobs"
            if req.return_logprob and 0 <= req.logprob_start_len <= max_prefix_len
            else "prompt_end",
        )
        return replan_without_load(plan, "unsupported") if state.unsupported else plan

    def _ratio_that_hides(self, lookups: Sequence[Lookup | None], num_keys: int) -> float:
        """The server's ratio, or more where that hides behind loads that the forward waits for anyway."""
        if self.tiers is None or self.landings is None:
            return self._args.ratio
        variants = [lookup.variant for lookup in lookups if lookup is not None and lookup.variant is not None]
        landings = [landing for variant in variants if (landing := self.landings.of(variant)) is not None]
        if not landings:
            return self._args.ratio
        num_tokens = sum(variant.length for variant in variants)
        streams = [landing.stream for landing in landings]
        return self.tiers.hidden_ratio(streams, num_tokens, num_keys, least=self._args.ratio)

    def _lookup_below(self, key: bytes, context: Sequence[bytes], state: DocChunkRequest) -> Lookup:
        """With the reason why the chunk was not brought up, where the tiers below have one."""
        lookup = self._lookup(key, context)
        found = state.tiers.get(key)
        if lookup.variant is None and found is not None and found.reason is not None:
            return dataclasses.replace(lookup, reason=found.reason)
        return lookup

    def _lookup(self, key: bytes, context: Sequence[bytes] | None = None) -> Lookup:
        assert self._index is not None
        max_generation = self.chunk_config.max_generation
        return self._index.lookup(key, self._store.resolve, context=context, max_generation=max_generation)

    # Tiers below the pool.

    def _create_tiers(self, ctx: TreeCacheBuildContext) -> ChunkTiers | None:
        if self.chunk_config.tiers is None:
            return None
        fingerprint = self._assembler.fingerprint(ctx.server_args, ctx.tp_rank, ctx.tp_size)
        try:
            tiers = create_tiers(
                self.chunk_config,
                fingerprint,
                pool=self,
                ratio=self._args.ratio,
                tp_group=ctx.tp_group.cpu_group if ctx.tp_size > 1 else None,
                device=torch.device(self.token_to_kv_pool_allocator.get_kvcache().device),
                is_counting=self._enable_metrics_flag and ctx.tp_rank == 0,
            )
        except (TierError, ImportError, ValueError) as error:
            refuse(f"--chunk-cache-config: tiers: {error}")
        if tiers is not None:
            atexit.register(tiers.close)
            assert self._index is not None
            self.landings = Landings(
                self._index,
                self._store,
                self._assembler,
                timeout_s=self.chunk_config.tiers.timeout_s,
                reduce_max=tiers.reduce_max,
            )
        return tiers

    def _write_down(self, variant: Variant | None) -> None:
        if variant is not None and self.tiers is not None:
            self.tiers.note_stored(variant)

    def has(self, key: bytes) -> bool:
        """Whether a usable variant of a chunk is in the pool."""
        return self._lookup(key).variant is not None

    def kv_of(self, variant: Variant) -> HostKV | None:
        """K and V of a variant in host memory; None where it is not stored in full."""
        if self._store.resolve(variant) < variant.length or (self.landings and self.landings.of(variant)):
            return None
        return self._assembler.gather(self._store.slots(variant, 0, variant.length).to(torch.int64))

    def bring_in(self, stored: StoredVariant, partition: Partition, stream: LayerStream | None) -> bool:
        """Makes a variant, in a node of its own, of what a tier had; False where the pool has no room for it.

        Args:
            stream: brings the KV that is not there yet; None = all is.
        """
        assert self._index is not None
        info = stored.info
        if not self._index.wants(info.key, start=info.start, generation=info.generation, context=info.context):
            return True
        length = len(info.token_ids)
        slots = self._allocate(length, ())
        if slots is None:
            return False
        if stream is None:
            self._assembler.fill(slots[:length].to(torch.int64), stored.k, stored.v)
        variant = self._index.add(
            info.key,
            length=length,
            start=info.start,
            generation=info.generation,
            context=info.context,
            home=self._store.insert_node(partition, info.token_ids, slots, 0),
            statistics=info.statistics,
        )
        assert variant is not None, "the index wanted it"
        if stream is not None:
            assert self.landings is not None
            self.landings.open(variant, slots[:length].to(torch.int64), stream)
        return True

    def note_load_failed(self, req: Req, state: DocChunkRequest, copies: Sequence[LayerCopy], reason: str) -> None:
        """KV that was to arrive during the forward did not, so all of the request is computed: the reply says so."""
        assert state.plan is not None
        assert self.landings is not None
        for copy in copies:
            self.landings.fail(copy.landing)
        logger.warning("Chunk cache: %s is computed in full, a chunk did not arrive (%s)", req.rid, reason)
        state.plan = replan_without_load(state.plan, reason)
        state.selection_report = None
        correct_report(req, state)
        self.chunk_metrics.count_fallback(reason)

    # Load.

    def load_back_is_cache_owned(self) -> bool:
        return False

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        req = params.req
        assert req is not None
        state = state_of(req)
        assert state is not None, "only chunks promise a load"
        assert state.plan is not None
        if state.load_len == 0:
            return 0, req.last_node
        used = [(chunk, self._variant(chunk)) for chunk in state.plan.chunks if chunk.num_reused]
        slots = self._allocate(state.load_len, [variant for _, variant in used])
        if slots is None:
            state.plan = replan_without_load(state.plan, "memory")
            logger.info(
                "Chunk cache: %s is computed in full, no room for %d tokens", req.rid, len(req.origin_input_ids)
            )
            return 0, req.last_node
        layer_copies = self._fill(slots, state.plan, used)
        state.admit(slots)
        state.layer_copies = layer_copies
        return len(slots), req.last_node

    def _variant(self, chunk: ChunkPlan) -> Variant:
        assert self._index is not None
        assert chunk.variant_id is not None
        variant = self._index.get(chunk.variant_id)
        assert variant is not None, "nothing is forgotten between a match and its admission"
        return variant

    def _allocate(self, num_tokens: int, sources: Sequence[Variant]) -> torch.Tensor | None:
        """Free slots for so many tokens, in whole pages; None where evicting all but `sources` is not enough.

        Also None where a source was landing and gave way: it is locked, but its KV will never be whole.
        """
        assert self._index is not None
        num_slots = -(-num_tokens // self.page_size) * self.page_size
        locks = [self._store.lock(variant) for variant in sources]
        try:
            evict_from_tree_cache(self, num_slots)
            slots = self.token_to_kv_pool_allocator.alloc(num_slots)
        finally:
            for lock in locks:
                self._store.unlock(lock)
        if slots is not None and any(self._index.get(variant.variant_id) is None for variant in sources):
            self.token_to_kv_pool_allocator.free(slots)
            return None
        return slots

    def _fill(
        self, slots: torch.Tensor, plan: RecomputePlan, used: Sequence[tuple[ChunkPlan, Variant]]
    ) -> tuple[LayerCopy, ...]:
        """Copies what is there; what is still on its way is returned, to be copied during the forward."""
        assert self._index is not None
        copies, layer_copies = [], []
        for chunk, variant in used:
            first = chunk.dst_start - plan.load_start
            source = self._store.slots(variant, chunk.src_offset, chunk.num_reused)
            target = slots[first : first + chunk.num_reused]
            delta = torch.full((chunk.num_reused,), chunk.shift, dtype=torch.int64, device=slots.device)
            landing = None if self.landings is None else self.landings.of(variant)
            if landing is None:
                copies.append((source, target, delta))
            else:
                layer_copies.append(LayerCopy(landing, source, target, delta))
        if copies:
            self._assembler.copy(*(torch.cat(parts) for parts in zip(*copies, strict=True)))
        for chunk, variant in used:
            self._index.touch(variant, 1.0 if chunk.cfo is None else use_weight(chunk.cfo, variant.length))
            self._store.touch(variant, self._priority(variant) if self._is_by_frequency else None)
        return tuple(layer_copies)

    def _priority(self, variant: Variant) -> int:
        assert self._index is not None
        return int(self._index.worth(variant))

    def insert(self, params: InsertParams) -> InsertResult:
        # Whatever is new begins with the age: it goes before what was reused lately, not before all that ever was.
        if self._index is not None and self._is_by_frequency:
            params.priority = max(params.priority or 0, int(self._index.age))
        return super().insert(params)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        state = state_of(req)
        if state is None or state.private_indices is None:
            return super().prefix_device_indices(req)
        assert state.plan is not None
        exact = self.path_device_indices(req.last_node)[: state.plan.prefix_len]
        prefix = torch.cat([exact, state.private_indices])
        assert len(prefix) == req.prefix_len, (req.rid, len(prefix), req.prefix_len)
        return prefix

    # Evict.

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_with(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        return self._evict_with(partial(super().evict_for_alloc, **kwargs), params)

    def _evict_with(self, evict: Callable[[EvictParams], EvictResult], params: EvictParams) -> EvictResult:
        """What SGLang evicts, and nodes that are still landing, which nothing else can evict, where that is too few."""
        self._before_eviction(params.num_tokens)
        result = evict(params)
        num_missing = params.num_tokens - result.num_tokens_evicted
        if num_missing > 0 and self.landings is not None and self.landings.give_way():
            result.num_tokens_evicted += evict(dataclasses.replace(params, num_tokens=num_missing)).num_tokens_evicted
        self._note_evicted(result.num_tokens_evicted)
        return result

    def evict_leaf(self, node_id: int) -> int:
        """Frees one leaf that nobody keeps; returns its tokens."""
        tracker = dict.fromkeys(self.tree_components, 0)
        self._evict_device_leaf(node_id, tracker)
        return sum(tracker.values())

    def _before_eviction(self, num_tokens: int) -> None:
        if self._index is not None:
            self.admin.before_eviction()
            if self.tiers is not None:
                self.tiers.save_victims(self._index, num_tokens)

    def _note_evicted(self, num_tokens: int) -> None:
        if self._index is not None and num_tokens:
            self._index.advance_age(num_tokens / self.token_to_kv_pool_allocator.size)
            self._index.sweep(self._store.resolve, num_tokens)

    # Remember.

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        state = state_of(req)
        if state is None:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        if state.selection_report is not None:
            complete_report(req, state)
        if not state.fused:
            super().checkpoint(req, up_to=up_to, **kwargs)
            if state.options.mode != "off" and not state.unsupported:
                self._remember_exact(req, state, up_to)
        elif req.finished():
            self._remember_missed(req, state, up_to)
            self._promote_used(state)

    def _remember_exact(self, req: Req, state: DocChunkRequest, up_to: int) -> None:
        """Every chunk of an exact prompt is a span in its path."""
        if state.remembered or not state.keys:
            return
        assert self._index is not None
        in_tree = min(up_to, req.kv.cache_protected_len)
        last_end = state.options.spans[-1][1]
        state.remembered = in_tree >= last_end
        if not (state.remembered or req.finished()):
            return  # the rest of the prompt is still to come
        path = PathTokens(req.origin_input_ids[:last_end], state.partition, req.last_node)
        for i, (start, end) in enumerate(state.options.spans):
            covered_len = min(end, in_tree) - start
            if 2 * covered_len >= end - start:
                if covered_len < end - start and self._lookup(state.keys[i]).covered_len >= covered_len:
                    continue  # the path holds no more of it than is stored already
                variant = self._index.add(
                    state.keys[i],
                    length=end - start,
                    start=start,
                    generation=0,
                    context=state.keys[:i],
                    prompt_keys=state.keys,
                    home=PathHome(path, start),
                    statistics=None if state.sums is None else state.sums.statistics(i),
                )
                self._write_down(variant)
            elif end <= up_to and self._is_new(state, i, generation=0):
                # The last page of a path is not stored: a short chunk at its end would be lost.
                self._remember_copy(req, state, i, generation=0)

    def _remember_missed(self, req: Req, state: DocChunkRequest, up_to: int) -> None:
        """Chunks that a fused request had to compute become nodes of their own (derived variants)."""
        plan = state.plan
        assert plan is not None
        generation = 0
        for i, chunk in enumerate(plan.chunks):
            if chunk.generation is not None and plan.ratio < 1.0:
                generation = max(generation, 1 + chunk.generation)
            if not chunk.is_to_remember or chunk.end > up_to:
                continue
            if generation > self.chunk_config.max_generation:
                self.chunk_metrics.count_not_remembered("generation_limit")
            elif self._is_new(state, i, generation):
                self._remember_node(req, state, i, generation)

    def _promote_used(self, state: DocChunkRequest) -> None:
        assert self._index is not None
        assert state.plan is not None
        for chunk in state.plan.chunks:
            variant = None if chunk.variant_id is None else self._index.get(chunk.variant_id)
            if variant is not None:
                self.maintenance.promote(variant, self._priority(variant))

    def _is_new(self, state: DocChunkRequest, i: int, generation: int) -> bool:
        """Not stored meanwhile by another request, or by an earlier occurrence in this one, and wanted by the index.

        A chunk that was computed because its variants do not fit this context is new if none of this context is stored.
        """
        assert self._index is not None
        key, (start, end), context = state.keys[i], state.options.spans[i], state.keys[:i]
        found = self._lookup(key, context)
        is_costly = state.plan is not None and state.plan.chunks[i].reason == "high_cfo"
        if found.covered_len == end - start and (not is_costly or found.unit_cfo == 0.0):
            return False
        return self._index.wants(key, start=start, generation=generation, context=context)

    def _remember_node(self, req: Req, state: DocChunkRequest, i: int, generation: int) -> None:
        start, end = state.options.spans[i]
        if self.page_size > 1 or start < req.kv.cache_protected_len:
            self._remember_copy(req, state, i, generation)
            return
        # Slots change owner: they are the request's own and a page holds one token.
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        self._handed_over.setdefault(req.kv.req_pool_idx, []).append((start, end))
        self._add_node(req, state, i, generation, row.to(torch.int64, copy=True))

    def _remember_copy(self, req: Req, state: DocChunkRequest, i: int, generation: int) -> None:
        start, end = state.options.spans[i]
        slots = self._allocate(end - start, ())
        if slots is None:
            logger.info("Chunk cache: no room to remember a chunk of %d tokens of %s", end - start, req.rid)
            self.chunk_metrics.count_not_remembered("memory")
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end].to(torch.int64)
        self._assembler.copy(row, slots[: end - start], torch.zeros_like(row))
        self._add_node(req, state, i, generation, slots)

    def _add_node(self, req: Req, state: DocChunkRequest, i: int, generation: int, slots: torch.Tensor) -> None:
        assert self._index is not None
        start, end = state.options.spans[i]
        home = self._store.insert_node(state.partition, req.origin_input_ids[start:end], slots, req.priority or 0)
        variant = self._index.add(
            state.keys[i],
            length=end - start,
            start=start,
            generation=generation,
            context=state.keys[:i],
            prompt_keys=state.keys,
            home=home,
            statistics=None if state.sums is None else state.sums.statistics(i),
        )
        self._write_down(variant)
        if variant is not None and generation:
            self.maintenance.note_derived(variant, req, i, state)

    # Release.

    def free_kv_row(self, kv: Any, ranges: Ranges) -> None:
        handed_over = self._handed_over.get(kv.req_pool_idx)
        kept = subtract_ranges(ranges, handed_over) if handed_over else ranges
        if kept:
            super().free_kv_row(kv, kept)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self._handed_over.pop(req.kv.req_pool_idx, None)
        state = state_of(req)
        if state is not None and not req.finished():
            state.restart()
        super().on_release(req, checkpointed=checkpointed)

    def reset(self) -> None:
        super().reset()
        if self._index is not None:
            self._index.clear()
            self.maintenance.clear()
            self.admin.after_reset()
            if self.tiers is not None:
                self.tiers.flush()
            if self.landings is not None:
                self.landings.clear()


def _rankings(method: Method, lookups: Sequence[Lookup | None]) -> list[Ranking | None] | None:
    """The statistic that the method ranks by, of each variant that was found."""
    if method.statistic is None:
        return None
    variants = [None if lookup is None else lookup.variant for lookup in lookups]
    return [
        None if variant is None or variant.statistics is None else variant.statistics.of(method.statistic)
        for variant in variants
    ]


def subtract_ranges(ranges: Ranges, taken: Ranges) -> Ranges:
    """Ascending, disjoint, half-open `ranges` without the ascending, disjoint `taken`."""
    left: Ranges = []
    for start, end in ranges:
        for taken_start, taken_end in taken:
            if taken_end <= start or end <= taken_start:
                continue
            if start < taken_start:
                left.append((start, taken_start))
            start = max(start, taken_end)
        if start < end:
            left.append((start, end))
    return left
