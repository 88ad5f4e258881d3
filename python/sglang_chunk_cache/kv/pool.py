"""ChunkPool: the KV pool as a place that chunks are brought into.

Verbs: `allocate` (slots, by eviction where there are too few), `load` (private slots of a request, to be filled by its
plan), `flush` (fills them, those of all loads at once), `kv_of`, `bring_in` (what the tiers below ask).

Promises: a load brings all it promised or nothing. Its sources are protected from eviction while it allocates. From
then until the `flush` with which the forward of the same step begins, nothing leaves the tree, and nobody reads or
frees the private slots. A copy that is enqueued needs no protection: whoever gets a source slot next writes to it on
the same stream, later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from chunk_cache.index.need import Need
from chunk_cache.index.variant import Variant
from chunk_cache.keys import Partition
from chunk_cache.manager import ChunkManager
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.recompute_plan import RecomputePlan
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.kv.assembler import HostKV, KVAssembler, hold
from sglang_chunk_cache.kv.layer_stream import LayerStream
from sglang_chunk_cache.kv.partial_load import LayerCopy, PartialLoads
from sglang_chunk_cache.kv.store import VariantStore
from sglang_chunk_cache.kv.stored_variant import StoredVariant
from sglang_chunk_cache.kv.transition import Transition


@dataclass(frozen=True)
class Load:
    """Private slots of one request, filled by the next `flush`.

    Attributes:
        plan: says what the slots hold: positions `[plan.load_start, plan.load_end)` of its prompt.
        slots: `[plan.load_len]` int64, on the device; the request's own.
        layer_copies: KV that is still on its way, to be copied during the forward.
        transitions: by variant; empty if the model keeps no states.
    """

    plan: RecomputePlan
    slots: torch.Tensor
    layer_copies: tuple[LayerCopy, ...]
    transitions: Mapping[int | None, Transition] = field(default_factory=dict)


class ChunkPool:
    """See the head of this file.

    Args:
        cache: SGLang's radix cache, which evicts.
        partial_loads: chunks of which not all layers are there; None = there never are any.
    """

    def __init__(
        self,
        cache: Any,
        manager: ChunkManager,
        store: VariantStore,
        assembler: KVAssembler,
        partial_loads: PartialLoads | None,
    ) -> None:
        self._cache = cache
        self._manager = manager
        self._store = store
        self._assembler = assembler
        self._partial_loads = partial_loads
        # Of loads since the last flush: slots that are read, slots that are written (int64 `[n]`), shift of K.
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def allocate(self, num_tokens: int, sources: Sequence[Variant] = ()) -> torch.Tensor | None:
        """Free slots for so many tokens, in whole pages; None where evicting all but `sources` is not enough.

        Also None where a source whose KV was still arriving was given up: it is locked, but will never be whole.
        """
        page_size, allocator = self._cache.page_size, self._cache.token_to_kv_pool_allocator
        num_slots = -(-num_tokens // page_size) * page_size
        # Most of the time there is room; then no source needs protection.
        has_room = allocator.available_size() >= num_slots
        locks = [] if has_room else [self._store.lock(variant) for variant in sources]
        try:
            with nullcontext() if has_room else _freed_at_once(allocator):
                evict_from_tree_cache(self._cache, num_slots)
                slots: torch.Tensor | None = allocator.alloc(num_slots)
        finally:
            for lock in locks:
                self._store.unlock(lock)
        if has_room or slots is None:
            return slots
        if any(self._manager.index.get(variant.variant_id) is None for variant in sources):
            allocator.free(slots)
            return None
        return slots

    def load(self, plan: RecomputePlan, *, behind: torch.Tensor | None = None) -> Load | None:
        """Slots for the hits of a plan, which `flush` fills; None where there is no room.

        Args:
            behind: the slot in front of a load that begins within a page; the rest of that page is the request's.
        """
        sources, page_size = self._manager.sources(plan), self._cache.page_size
        num_left = min(-plan.load_start % page_size, plan.load_len)  # slots that are left in that page
        slots = self.allocate(plan.load_len - num_left, [variant for _, variant in sources])
        if slots is None:
            return None
        if num_left:
            assert behind is not None, f"a load at {plan.load_start} begins within a page of {page_size}"
            left = behind.to(slots.dtype) + torch.arange(1, num_left + 1, dtype=slots.dtype, device=slots.device)
            slots = torch.cat([left, slots])
        slots = slots[: plan.load_len]  # what follows within a page finds the rest of it
        copied: dict[int, list[tuple[ChunkPlan, Variant]]] = {}  # by the node that they lie in
        layer_copies = []
        for chunk, variant in sources:
            partial = None if self._partial_loads is None else self._partial_loads.of(variant)
            if partial is None:
                copied.setdefault(self._store.node_id(variant), []).append((chunk, variant))
                continue
            first = chunk.dst_start - plan.load_start
            source = self._store.slots(variant, chunk.src_offset, chunk.num_reused)
            layer_copies.append(LayerCopy(partial, source, slots[first : first + chunk.num_reused], chunk.shift))
        self._note_copies(copied, slots, plan.load_start)
        self._manager.use(sources)
        self._touch([variant for _, variant in sources])
        known = self._store.transitions
        ids = () if known is None else [variant.variant_id for _, variant in sources]
        return Load(plan, slots, tuple(layer_copies), {} if known is None else {one: known.use(one) for one in ids})

    def _note_copies(
        self, copied: dict[int, list[tuple[ChunkPlan, Variant]]], slots: torch.Tensor, load_start: int
    ) -> None:
        """Notes copies for `flush`, with one look at each path of the tree."""
        for group in copied.values():
            path, starts = self._store.path_slots([variant for _, variant in group])
            for start, (chunk, _) in zip(starts, group, strict=True):
                first = start + chunk.src_offset
                source = path[first : first + chunk.num_reused]
                target = slots[chunk.dst_start - load_start : chunk.dst_end - load_start]
                self._copies.append((source, target, chunk.shift))

    @property
    def has_copies(self) -> bool:
        """Whether a `flush` has anything to do."""
        return bool(self._copies)

    def flush(self) -> None:
        """Enqueues the copies of all loads since the last time, as one."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        sources, targets, shifts = zip(*copies, strict=True)
        delta = np.repeat(np.array(shifts, dtype=np.int64), [len(source) for source in sources])
        (delta_on_device,) = upload([delta], targets[0].device)
        hold([*sources, *targets])
        self._assembler.copy(torch.cat(sources), torch.cat(targets), delta_on_device)

    def _touch(self, variants: Sequence[Variant]) -> None:
        last_of: dict[object, Variant] = {}
        for variant in variants:
            priority = self._manager.priority(variant)
            if priority is not None:
                self._store.touch(variant, priority)
            else:  # one touch is enough for all variants of a path
                last_of.pop(variant.holder, None)
                last_of[variant.holder] = variant
        for variant in last_of.values():
            self._store.touch(variant)

    # What the tiers below ask.

    def kv_of(self, variant: Variant) -> HostKV | None:
        """Copies a variant to host memory; None where it is not stored in full, or is no longer than its seam, so that
        nobody reuses it. Raises as `KVAssembler.gather`."""
        if self._store.resolve(variant) < variant.length or (self._partial_loads and self._partial_loads.of(variant)):
            return None
        known = self._store.transitions
        transition = None if known is None else known.get(variant.variant_id)
        if transition is not None and not transition.num_rules:
            return None
        kv = self._assembler.gather(self._store.slots(variant, 0, variant.length).to(torch.int64))
        return replace(kv, transition=transition)

    def bring_in(self, stored: StoredVariant, need: Need, partition: Partition, stream: LayerStream | None) -> bool:
        """Stores what a tier had as a variant with a node of its own, if the manager accepts it.

        Args:
            stream: brings the KV that is not there yet; None = all is.

        Returns:
            False where the pool has no room for it.
        """
        info = stored.info
        accept = self._manager.accept(info, need)
        if accept is None:
            return True
        known, transition = self._store.transitions, stored.transition
        if known is not None and transition is not None and not known.fits(transition):
            return False
        slots = self.allocate(info.length)
        if slots is None:
            return False
        if stream is None:
            self._assembler.fill(slots[: info.length].to(torch.int64), stored.k, stored.v)
        home = self._store.insert_node(partition, info.token_ids, slots, accept.priority)
        variant = self._manager.complete_accept(accept, home)
        if known is not None and transition is not None:
            known.put(variant.variant_id, transition)
        if stream is not None:
            assert self._partial_loads is not None
            self._partial_loads.open(variant, slots[: info.length].to(torch.int64), stream)
        return True


@contextmanager
def _freed_at_once(allocator: Any) -> Iterator[None]:
    """Has evicted slots freed at once, even while SGLang collects what finished requests free.

    Otherwise the eviction would see no room grow, and go on until the tree is empty.
    """
    is_collecting = allocator.free_group is not None
    if is_collecting:
        allocator.free_group_end()
    try:
        yield
    finally:
        if is_collecting:
            allocator.free_group_begin()
