"""ChunkRadixCache: SGLang's radix tree that also finds, loads and remembers text chunks.

It translates calls of SGLang; `chunk_cache.manager` decides, and `kv` carries out the decision: `match_prefix` (exact
prefix, then a plan for the chunks behind it), `init_load_back` and `load_part` (private slots, filled by the plan, at
once or in steps), `checkpoint` (remember chunks; keep approximate KV out of the tree), `insert`, `evict` (partitions
above their share give way first), `free_kv_row` (free the slots that no node took over), `on_release`, `reset`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from chunk_cache.options.kept_tokens import WINDOW_LEN
from chunk_cache.plan.plan_steps import part_of
from chunk_cache.plan.recompute_plan import RecomputePlan
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, get_args, refuse
from sglang_chunk_cache.host.attention_backend import keep_latent_rows
from sglang_chunk_cache.host.refresh import is_refresh
from sglang_chunk_cache.kv.layer_kv import is_latent
from sglang_chunk_cache.request.chunk_request import ChunkRequest, state_of
from sglang_chunk_cache.start.runtime import ChunkRuntime, create_runtime, known_runtime_of
from sglang_chunk_cache.telemetry.stages import stage

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictResult,
        InitLoadBackParams,
        InsertParams,
        InsertResult,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


logger = logging.getLogger(__name__)


def create(ctx: TreeCacheBuildContext) -> ChunkRadixCache:
    """Factory of `--radix-cache-backend chunk_cache`.

    Raises:
        StartRefused: the model's rotation is not supported.
    """
    args = get_args()
    if args is None:
        refuse("the radix cache backend chunk_cache is chosen by --chunk-cache, not by --radix-cache-backend.")
    cache = create_unified_radix_cache(ctx, cache_class=ChunkRadixCache)
    assert isinstance(cache, ChunkRadixCache)
    cache.init_chunks(args, ctx)
    return cache


class ChunkRadixCache(UnifiedRadixCache):
    chunks: ChunkRuntime | None = None

    def init_chunks(self, args: ChunkCacheArgs, ctx: TreeCacheBuildContext) -> None:
        """Second half of the construction, once the base class has built the tree."""
        self.chunks = create_runtime(self, args, ctx)
        if self.chunks.states is not None:
            _allow_nodes_without_state(self.components[ComponentType.MAMBA])
        if is_latent(self.token_to_kv_pool_allocator.get_kvcache()):
            keep_latent_rows()

    @property
    def _parts(self) -> ChunkRuntime:
        """The parts of the chunk cache, once the tree is built."""
        return known_runtime_of(self)

    # Lookup.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        state = None if params.req is None else state_of(params.req)
        if state is not None:
            params = self._with_window_left(params, state)
            params = self._with_passage_left(params, state)
        result = super().match_prefix(params)
        if state is None:
            return result
        req, num_prompt = params.req, len(params.req.origin_input_ids)
        max_prefix_len = len(params.key)
        admission = state.admission
        is_first = admission.plan is None  # later plans, made while it waits, give no trace spans
        with stage(self._parts.metrics, "planning", [req] if is_first else []) as attributes:
            plan = self._parts.manager.plan(
                state.prompt,
                prompt_len=num_prompt + len(req.output_ids),
                prefix_len=result.device_prefix_len,
                max_prefix_len=max_prefix_len,
                limit_reason="logprobs"
                if req.return_logprob and 0 <= req.logprob_start_len <= max_prefix_len
                else "prompt_end",
                decision=state.verification.decision,
                reasons=state.missing_reasons,
                num_generated=len(req.output_ids),
            )
            attributes |= plan.counts
        admission.propose(plan)
        return result._replace(host_hit_length=plan.load_len)

    def _with_window_left(self, params: MatchPrefixParams, state: ChunkRequest) -> MatchPrefixParams:
        """Leaves the prompt's last tokens to be computed where decoding keeps only a part: they score the others."""
        req, num_prompt = params.req, len(params.req.origin_input_ids)
        kept = None if req.session is not None else self._parts.manager.plan_kept(state.prompt, num_prompt)
        state.packing.plan(kept)
        num_before = num_prompt + len(req.output_ids) - WINDOW_LEN
        if kept is None or len(params.key) <= num_before:
            return params
        return dataclasses.replace(params, key=params.key[:num_before])

    def _with_passage_left(self, params: MatchPrefixParams, state: ChunkRequest) -> MatchPrefixParams:
        """Ends the match in front of a passage to prepare: all of it is computed, to learn what it does to states."""
        if self._parts.states is None or state.prompt.to_prepare is None:
            return params
        start, _ = state.options.spans[state.prompt.to_prepare]
        return dataclasses.replace(params, key=params.key[:start]) if start < len(params.key) else params

    # Load.

    def load_back_is_cache_owned(self) -> bool:
        return False

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        req = params.req
        assert req is not None
        state = state_of(req)
        assert state is not None, "only chunks promise a load"
        plan = state.admission.load_plan
        if plan is None:
            return 0, req.last_node
        load = self._parts.pool.load(state.admission.part or plan)
        if load is None:
            state.admission.propose(self._parts.manager.without_load(plan, "memory"))
            return 0, req.last_node
        state.admission.bring_in(load)
        return len(load.slots), req.last_node

    def load_part(self, req: Req, end: int) -> RecomputePlan | None:
        """Brings in the next part of a request that is computed in steps: from the end of its KV to position `end`.

        Returns:
            The plan of this part; None if it cannot be brought in: the rest of the prompt is computed then.
        """
        state, chunks = state_of(req), self._parts
        assert state is not None
        admission, begin = state.admission, req.prefix_len
        assert admission.plan is not None
        part = part_of(admission.plan, begin, end)
        is_stored = chunks.manager.is_stored(part)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        load = chunks.pool.load(part, behind=row[begin - 1]) if is_stored else None
        if load is None:
            reason = "memory" if is_stored else "evicted"
            state.fail_load(chunks.manager.without_load(admission.plan, reason, begin))
            chunks.metrics.add("fallbacks", reason)
            logger.info(
                "Chunk cache: %s is computed from token %d on, chunks did not come (%s)", req.rid, begin, reason
            )
            return None
        admission.bring_in(load)
        row[begin:end] = load.slots
        req.prefix_len = end
        return part

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        state = state_of(req)
        load = None if state is None else state.admission.load
        if load is None:
            return super().prefix_device_indices(req)
        prefix = load.slots
        if load.plan.prefix_len:
            prefix = torch.cat([self.path_device_indices(req.last_node)[: load.plan.prefix_len], prefix])
        assert len(prefix) == req.prefix_len, (req.rid, len(prefix), req.prefix_len)
        return prefix

    # Insert and evict.

    def insert(self, params: InsertParams) -> InsertResult:
        if self.chunks is not None:
            params.priority = self.chunks.manager.new_priority(params.priority or 0)
            self.chunks.store.note_change()
            return self.chunks.store.insert(params)
        return super().insert(params)

    def evict(self, params: EvictParams) -> EvictResult:
        return self._evict_with(super().evict, params)

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        return self._evict_with(partial(super().evict_for_alloc, **kwargs), params)

    def _evict_with(self, evict: Callable[[EvictParams], EvictResult], params: EvictParams) -> EvictResult:
        """Evicts as SGLang does; if that is too little, gives up nodes whose KV is still arriving, and evicts again."""
        chunks = self.chunks
        if chunks is None:
            return evict(params)
        chunks.pool.flush()
        chunks.admin.pins.renew()
        if chunks.tiers is not None:
            num_tokens = chunks.store.shares.num_to_give(params.num_tokens) or params.num_tokens
            chunks.tiers.save_victims(chunks.manager.index.victims(chunks.store.shares.above), num_tokens)
        result = evict(params)
        num_missing = params.num_tokens - result.num_tokens_evicted
        if num_missing > 0 and chunks.partial_loads is not None and chunks.partial_loads.give_way():
            result.num_tokens_evicted += evict(dataclasses.replace(params, num_tokens=num_missing)).num_tokens_evicted
        if result.num_tokens_evicted:
            chunks.store.note_change()
            chunks.manager.evicted(result.num_tokens_evicted, self.token_to_kv_pool_allocator.size)
        return result

    def _evict_components(self, request_by_type: dict[ComponentType, int], tracker: Any, **kwargs: Any) -> None:
        if self.chunks is not None:
            self.chunks.store.evict_above(request_by_type[ComponentType.FULL], tracker)
        super()._evict_components(request_by_type, tracker, **kwargs)

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        if self.chunks is None:
            return super()._evict_device_leaf(node_id, tracker)
        return self.chunks.store.evict_leaf(node_id, tracker)

    def erase_unread(self) -> int:
        """Evicts all that no request reads and nothing pins, overwrites free slots; returns how many tokens went."""
        result = self.evict(EvictParams(num_tokens=int(self.evictable_size())))
        allocator = self.token_to_kv_pool_allocator
        pages = allocator.get_all_free_pages().to(torch.int64) * allocator.page_size
        places = torch.arange(allocator.page_size, device=pages.device)
        self._parts.assembler.erase((pages[:, None] + places).reshape(-1))
        return int(result.num_tokens_evicted)

    # Remember and release.

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        state = state_of(req)
        if state is not None and state.packing.is_packed:
            return  # all was remembered before it was packed; its slots hold no prefix any more
        # A passage that is prepared stays as a node of its own, not as a path that nobody asks for again.
        if state is None or not (state.admission.is_fused or state.prompt.to_prepare is not None):
            super().checkpoint(req, up_to=up_to, **kwargs)
        elif req.finished():
            self._free_states(req)
        if state is not None:
            self._parts.keeper.remember(req, state, up_to, is_last=req.finished())
            state.packing.note_stored()

    def _free_states(self, req: Req) -> None:
        """Frees the states of a request that gives none to the tree."""
        for component in self._components_tuple:
            component.cleanup_after_caching_req(req, is_finished=True)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        left = ranges if self.chunks is None else self.chunks.keeper.left_of(kv.req_pool_idx, ranges)
        if left:
            super().free_kv_row(kv, left)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self._parts.keeper.release(req.kv.req_pool_idx)
        state = state_of(req)
        if state is not None:
            state.transitions = None
            if req.finished() and not is_refresh(req.rid):
                self._parts.note_ended(req.rid, state)
            if self._parts.gate is not None:
                self._parts.gate.release(state, req.output_ids_through_stop, _reason_not_to_verify(req))
            if not req.finished():
                state.restart()
        super().on_release(req, checkpointed=checkpointed)

    def reset(self) -> None:
        super().reset()
        chunks = self.chunks
        if chunks is not None:
            chunks.store.note_change()
            chunks.store.shares.clear()
            chunks.manager.index.clear()
            if chunks.store.transitions is not None:
                chunks.store.transitions.clear()
            chunks.keeper.clear()
            chunks.refresh.clear()
            chunks.admin.after_reset()
            if chunks.discoverer is not None:
                chunks.discoverer.clear()
            if chunks.tiers is not None:
                chunks.tiers.flush()
            if chunks.partial_loads is not None:
                chunks.partial_loads.clear()


def _allow_nodes_without_state(component: Any) -> None:
    """Lets a chunk's own node have no state: no prompt continues there. SGLang too evicts states and keeps the KV."""
    commit = component.commit_insert_component_data

    def commit_state(*, params: InsertParams, **kwargs: Any) -> None:
        if params.mamba_value is not None:
            commit(params=params, **kwargs)

    component.commit_insert_component_data = commit_state


def _reason_not_to_verify(req: Req) -> str | None:
    if not req.finished():
        return "retracted"
    return "aborted" if isinstance(req.finished_reason, FINISH_ABORT) else None
