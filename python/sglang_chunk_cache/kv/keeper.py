"""ChunkKeeper: carries out what the manager decides to keep of a prompt that was computed.

Verbs: `remember` (the chunks of a prompt that SGLang checkpoints, and promotions), `poll` (their statistics, which
follow), `left_of` (what of a request's slots is still its own), `release`, `distrust` (KV of other weights), `clear`.

Promises: KV of a fused request is never inserted under its exact prefix; its private slots are freed with it, or change
owner to a node of their own, never both. A promotion copies KV bit by bit at the position that it was computed at, or
does nothing where there is no room. A chunk is stored at once; its statistics take effect when they have come, on all
tensor-parallel ranks from the same step on, and nobody waits for them. KV of other weights than the model's is not
remembered. So after a change of weights, nothing is remembered while a request runs that began before, since the tree
may keep its KV in the place of another's; and no chunk that was found in an exact prefix, until the tree is emptied.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from chunk_cache.actions import Forgo, Keep, Promote
from chunk_cache.index.refresh import Origin, RefreshQueue
from chunk_cache.index.transition_store import ChunkTransitions
from chunk_cache.index.variant import Home, NodeHome, PathHome, PathTokens, Variant
from chunk_cache.manager import ChunkManager
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.retention import Soundness
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.chunk_sums import ChunkSums
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.kv.ranks import ReduceMax
from sglang_chunk_cache.kv.store import VariantStore
from sglang_chunk_cache.kv.transition import Transition
from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


logger = logging.getLogger(__name__)

Ranges = list[tuple[int, int]]


class Admitted(Protocol):
    """How a prompt was served."""

    @property
    def plan(self) -> RecomputePlan | None: ...

    @property
    def fused_plan(self) -> RecomputePlan | None:
        """The plan of a prompt with KV of chunks in it; None for one that is exact."""


class Computed(Protocol):
    """What this file reads of a request whose prompt was computed."""

    prompt: ChunkPrompt
    sums: ChunkSums | None
    transitions: ChunkTransitions[Transition] | None

    @property
    def admission(self) -> Admitted: ...


class _Awaited(NamedTuple):
    """A variant that is stored, and the sums that its statistics will come from."""

    variant_id: int
    sums: ChunkSums
    chunk: int


class ChunkKeeper:
    """See the head of this file.

    Args:
        cache: SGLang's radix cache, whose request rows are read.
        refresh: learns how derived variants can be computed exactly.
        note_stored: told of each variant that is stored, with its statistics; for the tiers below.
    """

    def __init__(
        self,
        cache: Any,
        manager: ChunkManager,
        store: VariantStore,
        pool: ChunkPool,
        assembler: KVAssembler,
        *,
        refresh: RefreshQueue,
        metrics: ChunkMetrics,
        note_stored: Callable[[Variant], None] | None,
        reduce_max: ReduceMax,
    ) -> None:
        self._cache = cache
        self._manager = manager
        self._store = store
        self._pool = pool
        self._assembler = assembler
        self._refresh = refresh
        self._metrics = metrics
        self._note_stored = note_stored
        self._reduce_max = reduce_max
        self._awaited: deque[_Awaited] = deque()
        self._handed_over: dict[int, Ranges] = {}  # request row -> ranges that became nodes
        self._remembered: set[int] = set()  # request rows whose (exact) prompt has all of its chunks in the index
        self._old_rows: dict[int, int] = {}  # request rows that began with other weights -> their generation
        self._has_old_prefixes = False  # whether the tree has exact KV of other weights

    def remember(self, req: Req, state: Computed, up_to: int, *, is_last: bool) -> None:
        """Keeps chunks of a request whose first `up_to` tokens were computed; those of an exact one are in the tree.

        Args:
            is_last: the request ends, or loses its KV: nothing is remembered of it later.
        """
        plan = state.admission.fused_plan
        if self._has_old_requests():
            return
        if plan is None:
            self._remember_exact(req, state, up_to, is_last)
        elif is_last:
            soundness = self._soundness(state)
            for keep in self._kept(self._manager.remember_fused(state.prompt, plan, up_to=up_to, soundness=soundness)):
                self._keep(req, state, keep, self._own_home(req, state, keep))
            for promotion in self._manager.promote(plan):
                self._promote(promotion)
        self.poll()

    @property
    def is_waiting(self) -> bool:
        """Whether statistics are still on their way."""
        return bool(self._awaited)

    def poll(self) -> None:
        """Applies statistics that have come to all ranks, in the order of the chunks; called once per scheduling step.

        Most are there when their request has finished: SGLang has waited for the result of the forward behind them.
        """
        if not self._awaited:
            return  # on all ranks: they store and await the same
        num_there = sum(1 for _ in itertools.takewhile(lambda one: one.sums.is_there(one.chunk), self._awaited))
        for _ in range(-int(self._reduce_max(np.array([-num_there], dtype=np.int64))[0])):
            one = self._awaited.popleft()
            variant = self._manager.index.describe(one.variant_id, one.sums.statistics(one.chunk))
            if variant is not None and self._note_stored is not None:
                self._note_stored(variant)

    def distrust(self) -> None:
        """Notes that the weights were changed: the tree's KV, and what running requests compute, is of the old ones."""
        self._awaited.clear()
        rows = self._cache.req_to_token_pool
        free = set(rows.free_slots)
        self._old_rows = {row: one for row, one in enumerate(rows.req_generation.tolist()) if row and row not in free}
        is_empty = self._cache.evictable_size() + self._cache.protected_size() == 0
        self._has_old_prefixes = bool(self._old_rows) or not is_empty

    def _has_old_requests(self) -> bool:
        """Whether a request still runs that began with other weights."""
        if self._old_rows:
            rows = self._cache.req_to_token_pool
            free, generations = set(rows.free_slots), rows.req_generation
            self._old_rows = {
                row: one for row, one in self._old_rows.items() if row not in free and int(generations[row]) == one
            }
        return bool(self._old_rows)

    def clear(self) -> None:
        """Forgets what belonged to a tree that was emptied."""
        self._awaited.clear()
        self._old_rows.clear()
        self._has_old_prefixes = False

    def _soundness(self, state: Computed) -> Soundness:
        def lacks_states(chunk: int) -> bool:
            return self._store.transitions is not None and self._transition(state, chunk) is None

        return Soundness(lacks_states, self._has_old_prefixes)

    def _kept(self, actions: Iterable[Keep | Forgo]) -> Iterator[Keep]:
        """The actions that keep a chunk; the others are counted."""
        for action in actions:
            if isinstance(action, Keep):
                yield action
            else:
                self._metrics.add("not_remembered", action.reason)

    def _remember_exact(self, req: Req, state: Computed, up_to: int, is_last: bool) -> None:
        prompt, row = state.prompt, req.kv.req_pool_idx
        if row in self._remembered or not prompt.keys or prompt.unsupported:
            return
        in_tree = min(up_to, req.kv.cache_protected_len)
        last_end = prompt.options.spans[-1][1]
        if in_tree >= last_end:
            self._remembered.add(row)
        elif not is_last:
            return  # the rest of the prompt is still to come
        # A prompt that prepares a chunk stays out of the tree, so its slots are the request's own.
        home_of = self._copied_home if prompt.to_prepare is None else self._own_home
        path = self._store.path(req.origin_input_ids, last_end, prompt.partition, req.last_node)
        actions = self._manager.remember_exact(
            prompt, state.admission.plan, in_tree=in_tree, up_to=up_to, soundness=self._soundness(state)
        )
        for keep in self._kept(actions):
            in_path = PathHome(path, prompt.options.spans[keep.chunk][0]) if keep.in_path else None
            self._keep(req, state, keep, in_path or home_of(req, state, keep))

    def _keep(self, req: Req, state: Computed, keep: Keep, home: Home | None) -> None:
        if home is None:
            return
        variant = self._manager.complete(state.prompt, keep, home)
        if variant is None:
            return
        transition = self._transition(state, keep.chunk)
        if self._store.transitions is not None and transition is not None and state.transitions is not None:
            state.transitions.drop(keep.chunk)
            self._store.transitions.put(variant.variant_id, transition)
        if state.sums is not None and state.sums.has(keep.chunk):
            self._awaited.append(_Awaited(variant.variant_id, state.sums, keep.chunk))
        elif self._note_stored is not None:
            self._note_stored(variant)
        if keep.is_prepared:
            self._metrics.add("maintenance", "prepared")
        # Chunks of a LoRA adapter are not refreshed: once the server is idle, no request holds the adapter, and it may
        # be gone. Nor are chunks behind images: a refresh has token ids only.
        elif keep.generation and req.lora_id is None and not state.prompt.has_images_up_to(keep.chunk):
            spans = state.prompt.options.spans[: keep.chunk + 1]
            self._refresh.note(variant, Origin(req.origin_input_ids[: spans[-1][1]], spans, state.prompt.partition))

    def _transition(self, state: Computed, chunk: int) -> Transition | None:
        """The transition of a chunk; None if the chunk was not computed whole, or there is no room for it."""
        store = self._store.transitions
        if store is None or state.transitions is None:
            return None
        found = state.transitions.of(chunk, state.prompt.options.spans[chunk][1])
        return found if found is not None and store.fits(found) else None

    def _own_home(self, req: Req, state: Computed, keep: Keep) -> NodeHome | None:
        start, end = state.prompt.options.spans[keep.chunk]
        if self._cache.page_size > 1 or start < req.kv.cache_protected_len:
            return self._copied_home(req, state, keep)
        # Slots change owner: they are the request's own and a page holds one token.
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        self._handed_over.setdefault(req.kv.req_pool_idx, []).append((start, end))
        return self._insert(req, state, keep, row.to(torch.int64, copy=True))

    def _copied_home(self, req: Req, state: Computed, keep: Keep) -> NodeHome | None:
        start, end = state.prompt.options.spans[keep.chunk]
        slots = self._pool.allocate(end - start)
        if slots is None:
            logger.info("Chunk cache: no room to remember a chunk of %d tokens of %s", end - start, req.rid)
            self._metrics.add("not_remembered", "memory")
            return None
        row = self._cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end].to(torch.int64)
        self._assembler.copy(row, slots[: end - start], torch.zeros_like(row))
        return self._insert(req, state, keep, slots)

    def _insert(self, req: Req, state: Computed, keep: Keep, slots: torch.Tensor) -> NodeHome:
        start, end = state.prompt.options.spans[keep.chunk]
        priority = self._manager.new_priority(req.priority or 0)
        return self._store.insert_node(state.prompt.partition, req.origin_input_ids[start:end], slots, priority)

    def _promote(self, promotion: Promote) -> None:
        variant, path = promotion.variant, promotion.variant.holder
        assert isinstance(path, PathTokens)
        slots = self._pool.allocate(variant.length, [variant])
        if slots is None:
            return
        source = self._store.slots(variant, 0, variant.length)
        self._assembler.copy(source, slots[: variant.length], torch.zeros_like(source))
        home = self._store.insert_node(path.partition, variant.token_ids, slots, promotion.priority)
        self._manager.complete_promote(promotion, home)
        self._metrics.add("maintenance", "promoted")

    def left_of(self, request_row: int, ranges: Ranges) -> Ranges:
        """The parts of ascending, disjoint ranges of a request's tokens that did not become nodes."""
        return subtract_ranges(ranges, self._handed_over.get(request_row, ()))

    def release(self, request_row: int) -> None:
        """Forgets a row that is about to belong to another request."""
        self._handed_over.pop(request_row, None)
        self._remembered.discard(request_row)


def subtract_ranges(ranges: Ranges, taken: Ranges | tuple[()]) -> Ranges:
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
