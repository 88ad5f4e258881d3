"""KVPacker: what decoding keeps of a prompt, packed into fewer slots (A3's extension, with SnapKV).

    before   | S | chunks ........................... | question | answer     one slot per token
    after    | S | best of head 0 / best of head 1 ...| question | answer     a slot holds another token for each head

Verb: `pack_due` (between two decoding steps: requests whose prompt's result was processed).

Promises: before a prompt is packed, all that is to be remembered of it is remembered. Slots of the prefix cache are
only read, and unlocked at once; the request's own old slots are freed at once. From then on the request's row of slots
is shorter than its tokens, all of it is its own, and nothing of it enters the prefix cache. A request for whose copy
there is no room stays whole.
New tokens have their true positions (`host/forward_batch`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from chunk_cache.options.kept_tokens import KeptTokens
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.keeper import ChunkKeeper, Computed
from sglang_chunk_cache.kv.packing import Packing
from sglang_chunk_cache.kv.pool import ChunkPool

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)


class Packable(Computed, Protocol):
    """What this file reads of a request."""

    packing: Packing


class KVPacker:
    """See the head of this file; `cache` is SGLang's radix cache."""

    def __init__(self, cache: Any, pool: ChunkPool, keeper: ChunkKeeper, assembler: KVAssembler) -> None:
        self._cache = cache
        self._pool = pool
        self._keeper = keeper
        self._assembler = assembler

    def pack_due(self, batch: ScheduleBatch, requests: Sequence[Packable | None]) -> None:
        """Packs the requests of a decoding batch that may be packed, and sets the batch's lengths to the packed ones.

        Args:
            requests: of the batch; None = one without chunks.
        """
        num_dropped = [
            0 if request is None or req.finished() else self._pack(req, request)
            for req, request in zip(batch.reqs, requests, strict=True)
        ]
        if not any(num_dropped):
            return
        dropped = np.array(num_dropped, dtype=np.int64)
        # New tensors: forwards that were launched have the old ones.
        batch.seq_lens = batch.seq_lens - upload([dropped], batch.seq_lens.device)[0]
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.from_numpy(dropped)
        batch.seq_lens_sum = None

    def _pack(self, req: Req, request: Packable) -> int:
        """Packs a request that may be packed; returns how many slots fewer it has."""
        packing = request.packing
        due = packing.due
        if due is None:
            return 0
        kept, chosen = due
        kv, num_slots = req.kv, req.kv.kv_allocated_len
        assert kv.kv_committed_len == num_slots
        num_kept = num_slots - kept.num_dropped
        slots = self._pool.allocate(num_kept)
        if slots is None:
            logger.info("Chunk cache: no room to pack %s into %d slots", req.rid, num_kept)
            packing.stay_whole()
            return 0
        self._keeper.remember(req, request, num_slots, is_last=True)
        row = self._cache.req_to_token_pool.req_to_token[kv.req_pool_idx, :num_slots]
        places = _kept_places(kept, chosen, num_slots)
        # Frees its own slots, except those that became nodes; nobody writes to them before the copy has read them.
        self._cache.free_kv_row(kv, [(kv.cache_protected_len, num_slots)])
        self._assembler.pack(row, places, slots[:num_kept].to(torch.int64))
        self._keeper.release(kv.req_pool_idx)
        self._cache.unlock(req.lock)
        req.lock = None
        kv.cache_protected_len = kv.cache_inserted_len = 0
        kv.kv_committed_len = kv.kv_allocated_len = num_kept
        packing.complete()
        return kept.num_dropped


def _kept_places(kept: KeptTokens, chosen: torch.Tensor, num_slots: int) -> torch.Tensor:
    """`[num_layers, num_kv_heads, num_kept]` kept places of a row of `num_slots`; `chosen`: see `Packing`."""
    device, shape = chosen.device, chosen.shape[:2]
    front = torch.arange(kept.begin, device=device).expand(*shape, -1)
    back = torch.arange(kept.end, num_slots, device=device).expand(*shape, -1)
    return torch.cat([front, chosen, back], dim=-1)
