"""Hooks of `Req` and `ScheduleBatch`: what is done before a request is matched, and which tokens count as cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_chunk_cache.request.chunk_request import state_of
from sglang_chunk_cache.start.runtime import runtime_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def init_next_round_input(
    original: Callable[..., None], req: Req, tree_cache: Any = None, *args: Any, **kwargs: Any
) -> None:
    """AROUND `Req.init_next_round_input`: puts what the tiers have found into the pool, before SGLang matches."""
    chunks = runtime_of(tree_cache)
    if chunks is not None and chunks.tiers is not None and (state := state_of(req)) is not None:
        state.tiers = chunks.tiers.bring_in(req.rid) or state.tiers or {}
    original(req, tree_cache, *args, **kwargs)


def prepare_for_extend(original: Callable[..., None], batch: ScheduleBatch) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`: `cached_tokens` counts exact tokens only."""
    first_time = [
        (req, len(state.admission.load.slots), not req.already_computed)
        for req in batch.reqs
        if (state := state_of(req)) is not None and state.admission.load is not None and not req.retracted_stain
    ]
    original(batch)
    for req, load_len, is_first in first_time:
        req.cached_tokens -= load_len
        if is_first:  # SGLang does not count what comes in a later step
            req.cached_tokens_host -= load_len
