"""The prefill server of a pair (`--disaggregation-mode prefill`), where it differs from one that decodes too.

Verbs: `waiting` (all requests that wait), `drop_waiting` (removes some of them), `refuse_kept` (before one is sent).
For requests that no decode server waits for: `own_fields`, `let_store`.

A request waits in the bootstrap queue until its decode server has room, and then in SGLang's waiting queue; its loads
from the tiers begin when it arrives. Once computed, it is sent from its own row of slots, private ones included, and
released when all has arrived; then its fused chunks get nodes.

Promise: no decode server mistakes KV of fused requests for exact KV. A decode server that keeps prefixes says with each
request how many of its tokens it has; such a request fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_chunk_cache.request.chunk_request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def refuse_kept(req: Req, *, is_last: bool) -> bool:
    """Whether the decode server has kept a prefix, so nothing is sent; with the last part both get the error."""
    num_kept = req.disagg_decode_prefix_len
    if num_kept and is_last:
        reason = (
            f"the decode server has kept {num_kept} tokens of the prompt, which may be those of a chunk; start it "
            "without --disaggregation-decode-enable-radix-cache"
        )
        logger.error("Chunk cache: %s fails: %s", req.rid, reason)
        req.disagg_kv_sender.kv_mgr.conclude_failure(bootstrap_room=req.bootstrap_room, failure_reason=reason)
    return num_kept > 0


def own_fields(server_args: Any) -> dict[str, Any]:
    """Extra fields of a request that the server makes itself: it is sent to no decode server, like a health check."""
    if server_args.disaggregation_mode != "prefill":
        return {}
    return {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": 0}


def let_store(req: Req) -> None:
    """Lets chunks of a request be stored although no decode server waits for it: it was sent to store them.

    SGLang stores nothing of such requests, which it takes for health checks and the like.
    """
    if req.bootstrap_host == FAKE_BOOTSTRAP_HOST and req.positional_embed_overrides is None:
        req.skip_radix_cache_insert = state_of(req) is None


def waiting(scheduler: Scheduler) -> list[Req]:
    """All requests that wait, the newest last."""
    bootstrap = scheduler.disagg_prefill_bootstrap_queue
    return [*scheduler.waiting_queue, *([] if bootstrap is None else bootstrap.queue)]


def drop_waiting(scheduler: Scheduler, drops: Callable[[Req], bool]) -> None:
    """Removes the waiting requests that `drops` selects, without an answer: nobody reads them."""
    dropped = [req for req in waiting(scheduler) if drops(req)]
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if not drops(req)]
    bootstrap = scheduler.disagg_prefill_bootstrap_queue
    if bootstrap is not None:
        bootstrap.queue = [req for req in bootstrap.queue if not drops(req)]
        for req in dropped:
            scheduler.release_aborted_prefill_waiting_req(req)
