"""Requests of administration on their way through a scheduler process: `add_admin_requests`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import psutil
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from sglang_chunk_cache.admin import scheduler_side as messages
from sglang_chunk_cache.kv.ranks import ranks_of_batch


def add_admin_requests(scheduler: Any) -> None:
    """Lets a scheduler answer the requests of `messages`; called once its dispatcher is there."""
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(kind, partial(_answer, scheduler)) for kind in messages.REQUESTS]
    )


def _answer(scheduler: Any, request: Any) -> messages.ChunkCacheAdminReply:
    """Runs on every rank; only rank 0 has a socket to send the reply on."""
    admin, unfinished = scheduler.tree_cache.chunks.admin, scheduler.chunked_req
    admin.num_due = 0 if unfinished is None else len(unfinished.full_untruncated_fill_ids) - unfinished.extend_end
    admin.has_pool = GPU_MEMORY_TYPE_KV_CACHE not in scheduler.weight_updater.offload_tags
    result = admin.answer(request)
    group, dp_rank = ranks_of_batch(), get_parallel().dp_rank or 0
    if isinstance(request, messages.ChunkCacheStatsReq):
        memory = psutil.Process().memory_info()
        place = {"dp_rank": dp_rank, "tp_rank": group.rank_in_group}
        own = {**place, "pid": os.getpid(), "rss_bytes": memory.rss, **result}
        ranks = group.all_gather_object(own) if group.world_size > 1 else [own]
        return messages.ChunkCacheAdminReply(ranks=ranks, dp_rank=dp_rank)
    if isinstance(request, messages.ChunkCacheRequestsReq):
        return messages.ChunkCacheAdminReply(ranks=[result], dp_rank=dp_rank)
    results = group.all_gather_object(result) if group.world_size > 1 else [result]
    agree = all(other == result for other in results)
    return messages.ChunkCacheAdminReply(ranks=results[:1], agree=agree, dp_rank=dp_rank)
