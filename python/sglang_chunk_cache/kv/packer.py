"""KVPacker: what decoding keeps of a prompt, packed into fewer slots (A3's extension, with SnapKV).

    before   | S | chunks ........................... | question | answer     one slot per token
    after    | S | best of head 0 / best of head 1 ...| question | answer     a slot holds another token for each head

Verb: `pack_due` (between two decoding steps: requests whose prompt's result was processed).

Promises: all that is to be remembered of a prompt is remembered before. Slots of the prefix cache are only read; they
are unlocked, and the request's own are given back, at once. From then on its row of slots is shorter than its tokens,
all of it is its own, and nothing of it enters the prefix cache. A request for whose copy there is no room stays whole.
New tokens have their true positions (`host/forward_batch`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.keeper import ChunkKeeper
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.request.chunk_request import ChunkRequest, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)


class KVPacker:
    """See the head of this file; `cache` is SGLang's radix cache."""

    def __init__(self, cache: Any, pool: ChunkPool, keeper: ChunkKeeper, assembler: KVAssembler) -> None:
        self._cache = cache
        self._pool = pool
        self._keeper = keeper
        self._assembler = assembler

    def pack_due(self, batch: ScheduleBatch) -> None:
        """Packs what may be packed of a batch that decodes; its lengths become those of the packed rows."""
        due = [self._is_due(req) for req in batch.reqs]
        if not any(due):
            return
        num_dropped = [self._pack(req) if is_due else 0 for req, is_due in zip(batch.reqs, due, strict=True)]
        dropped = np.array(num_dropped, dtype=np.int64)
        # New tensors: forwards that were launched have the old ones.
        batch.seq_lens = batch.seq_lens - upload([dropped], batch.seq_lens.device)[0]
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.from_numpy(dropped)
        batch.seq_lens_sum = None

    @staticmethod
    def _is_due(req: Req) -> bool:
        state = state_of(req)
        return state is not None and state.is_prefilled and state.chosen is not None and not req.finished()

    def _pack(self, req: Req) -> int:
        """How many slots fewer the request has."""
        state = state_of(req)
        assert state is not None
        assert state.kept is not None
        kv, num_slots = req.kv, req.kv.kv_allocated_len
        assert kv.kv_committed_len == num_slots
        num_kept = num_slots - state.kept.num_dropped
        slots = self._pool.allocate(num_kept)
        if slots is None:
            logger.info("Chunk cache: no room to pack %s into %d slots", req.rid, num_kept)
            state.kept, state.chosen = state.kept.whole, None
            return 0
        self._keeper.remember(req, state, num_slots, is_last=True)
        row = self._cache.req_to_token_pool.req_to_token[kv.req_pool_idx, :num_slots]
        kept = _kept_places(state, num_slots)
        # Its own slots, but for those that became nodes; nobody writes to them before the copy has read them.
        self._cache.free_kv_row(kv, [(kv.cache_protected_len, num_slots)])
        self._assembler.pack(row, kept, slots[:num_kept].to(torch.int64))
        self._keeper.release(kv.req_pool_idx)
        self._cache.unlock(req.lock)
        req.lock = None
        kv.cache_protected_len = kv.cache_inserted_len = 0
        kv.kv_committed_len = kv.kv_allocated_len = num_kept
        state.chosen = None
        state.is_packed = True
        return state.kept.num_dropped


def _kept_places(state: ChunkRequest, num_slots: int) -> torch.Tensor:
    """`[num_layers, num_kv_heads, num_kept]` what is kept of a row of `num_slots`, ascending."""
    assert state.chosen is not None
    assert state.kept is not None
    device, shape = state.chosen.device, state.chosen.shape[:2]
    front = torch.arange(state.kept.begin, device=device).expand(*shape, -1)
    back = torch.arange(state.kept.end, num_slots, device=device).expand(*shape, -1)
    return torch.cat([front, state.chosen, back], dim=-1)
