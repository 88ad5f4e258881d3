"""ChunkScheduler: SGLang's scheduler; a request waits in the queue for its chunks and for the scores of the selector,
and others go on.

Promises: a request that waits keeps its place in the queue; a step costs a look at each request of the queue. A refresh
starts only when the scheduler is idle, one at a time. So does a verification, which gives up after its current step if
anything arrives.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_chunk_cache.host.admin_requests import add_admin_requests
from sglang_chunk_cache.host.disaggregation import drop_waiting, let_store, own_fields, refuse_kept, waiting
from sglang_chunk_cache.host.dp_attention import telling_rows
from sglang_chunk_cache.host.output_streamer import ChunkOutputStreamer
from sglang_chunk_cache.host.prefill_adder import ChunkPrefillAdder
from sglang_chunk_cache.host.refresh import is_refresh, refresh_request
from sglang_chunk_cache.host.selector import add_selector_answers
from sglang_chunk_cache.request.chunk_request import discover, forget, leave_images_exact, state_of
from sglang_chunk_cache.start.draft_model import follow_draft
from sglang_chunk_cache.start.model_check import check_loaded_model
from sglang_chunk_cache.start.pool_check import check_pool
from sglang_chunk_cache.start.runtime import ChunkRuntime, known_runtime_of
from sglang_chunk_cache.telemetry.stages import note_stage
from sglang_chunk_cache.tiers.search import Wanted
from sglang_chunk_cache.verification.exact_pass import open_pass

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.002
"""Seconds that a step with nothing to do waits: workers of the tiers need the interpreter, the selector the cores."""
MAX_AHEAD = 256
"""Waiting requests whose rows are counted for one that loads behind them: computing these takes longer than a load."""


class ChunkScheduler(Scheduler):
    waiting_queue: list[Req]
    dp_attn_adapter: SchedulerDPAttnAdapter
    _num_refreshes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        draft = None if self.draft_worker is None else self.draft_worker.draft_worker  # n-grams have no model
        if draft is not None:
            check_pool(draft.draft_runner.token_to_kv_pool)
            chunks = self._chunks
            kernel = chunks.manager.config.kernel
            follow_draft(chunks.assembler, self.tp_worker.model_runner, draft.draft_runner, kernel)
        check_loaded_model(self, self._chunks)

    def get_prefill_adder_class(self) -> partial[ChunkPrefillAdder]:
        return partial(ChunkPrefillAdder, num_in_transfer=len(self.disagg_prefill_inflight_queue or ()))

    def get_output_streamer_class(self) -> type[ChunkOutputStreamer]:
        return ChunkOutputStreamer

    def init_dp_attn_adapter(self) -> None:
        super().init_dp_attn_adapter()
        self.dp_attn_adapter = telling_rows(self.dp_attn_adapter)

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        add_admin_requests(self)
        add_selector_answers(self)

    def _add_request_to_queue(self, req: Req, *args: Any, **kwargs: Any) -> None:
        chunks = self._chunks
        if req.to_finish is not None:
            forget(req)
        elif chunks.discoverer is not None:
            discover(req, chunks.discoverer)
        if not chunks.reuses_images:
            leave_images_exact(req)
        if chunks.gate is not None and (state := state_of(req)) is not None:
            chunks.gate.steer(state)
        let_store(req)
        super()._add_request_to_queue(req, *args, **kwargs)
        queue = waiting(self)
        if chunks.tiers is None or not queue or queue[-1] is not req:
            return  # refused: the queue is full
        ahead = queue[: min(len(queue) - 1, MAX_AHEAD)]
        chunks.tiers.want(
            req.rid,
            _wanted(chunks, req),
            num_keys=len(req.origin_input_ids),
            num_rows=partial(self._num_rows_without_loads, req),
            num_rows_ahead=sum(_num_rows(other) for other in ahead),
        )

    def _num_rows_without_loads(self, req: Req) -> int:
        """Rows per layer of a request with chunks if it were planned now, with no chunk loaded from a tier."""
        state, ids = state_of(req), req.origin_input_ids
        assert state is not None
        key = RadixKey(ids[:-1], extra_key=req.extra_key, cache_salt=req.cache_salt)
        prefix_len, _, _ = self.tree_cache.tree_core.match_full_device_prefix(key)
        plan = self._chunks.manager.plan(
            state.prompt, prompt_len=len(ids), prefix_len=prefix_len, max_prefix_len=len(ids) - 1
        )
        return plan.num_computed + plan.num_recomputed + plan.num_asking

    def _get_new_batch_prefill_raw(self, *args: Any, **kwargs: Any) -> Any:
        if self.grammar_manager.has_waiting_grammars():
            # The original begins so too; done here, the loads of these requests are known before any is admitted.
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)
        self._chunks.keeper.poll()
        self._chunks.clock.harvest()
        tiers, queue = self._chunks.tiers, self.waiting_queue
        if tiers is not None:
            tiers.poll([req.rid for req in waiting(self)])
        if self._chunks.partial_loads is not None:
            self._chunks.partial_loads.poll()
        if self._chunks.events is not None:
            self._chunks.events.publish()
        held = {id(req) for req in queue if self._is_held(req)}
        if not held:
            return super()._get_new_batch_prefill_raw(*args, **kwargs)
        with self._queue_without(held) as is_alone:
            new_batch, running_batch = super()._get_new_batch_prefill_raw(*args, **kwargs)
        if is_alone and new_batch is None and running_batch.is_empty():
            if tiers is None:
                time.sleep(IDLE_WAIT_S)
            else:
                tiers.wait(IDLE_WAIT_S)
        return new_batch, running_batch

    @contextlib.contextmanager
    def _queue_without(self, held: set[int]) -> Iterator[bool]:
        """Takes the requests whose `id()` is in `held` out of the queue in the scope; then each gets its old place.

        SGLang reads, sorts and replaces the attribute while it chooses requests to admit, and has no other way to skip
        one. Yields whether no other request waits.
        """
        queue = self.waiting_queue
        self.waiting_queue = [req for req in queue if id(req) not in held]
        try:
            yield not self.waiting_queue
        finally:
            self.waiting_queue = merge(queue, self.waiting_queue, held)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        # Between two decoding steps: the prompt's result was processed, and no row of slots is being prepared.
        self._chunks.packer.pack_due(batch, [state_of(req) for req in batch.reqs])
        return super().update_running_batch(batch)

    def send_kv_chunk(self, req: Req, last_chunk: bool = False, **kwargs: Any) -> None:
        if not refuse_kept(req, is_last=last_chunk):
            super().send_kv_chunk(req, last_chunk, **kwargs)

    def maybe_send_cached_prefix_chunk(self, req: Req, allow_send: bool = True) -> None:
        """Sends the cached prefix before the forward, unless the request brings in chunks: their KV is not there."""
        state = state_of(req)
        brings_in = state is not None and state.admission.load is not None
        super().maybe_send_cached_prefix_chunk(req, allow_send and not brings_in)

    def _is_held(self, req: Req) -> bool:
        """Whether a request waits for loads or scores; notes the time as the stage `loading` once it no longer does."""
        state, is_held = state_of(req), self._waits(req)
        if state is not None and is_held and state.held_since is None:
            state.held_since = time.time_ns()
        elif state is not None and not is_held and state.held_since is not None:
            note_stage(self._chunks.metrics, "loading", [req], state.held_since)
            state.held_since = None
        return is_held

    def _waits(self, req: Req) -> bool:
        """Whether loads are missing, or scores that decide which tokens of stored chunks are recomputed."""
        chunks = self._chunks
        if chunks.tiers is not None and chunks.tiers.is_held(req.rid):
            return True
        state = state_of(req)
        if state is None or not state.may_await_scores or not chunks.manager.awaits_scores(state.options):
            return False
        is_loaded = chunks.tiers is not None and chunks.tiers.has_found(req.rid)
        return is_loaded or any(chunks.manager.index.has(key) for key in state.prompt.keys)

    def on_idle(self) -> None:
        super().on_idle()
        if not self.is_fully_idle() or self.weight_updater.offload_tags:  # its memory was given away for a while
            return
        origin = self._chunks.refresh.take()
        if origin is None:
            self._verify()
            return
        logger.info("Chunk cache: idle, a popular derived variant is computed exactly")
        self._chunks.metrics.add("maintenance", "refreshed")
        self._num_refreshes += 1
        self.handle_generate_request(refresh_request(self._num_refreshes, origin, **own_fields(self.server_args)))

    def _verify(self) -> None:
        """Verifies one fused reply in steps; looks for new messages after each step, and gives up if one came."""
        gate, num_free = self._chunks.gate, self.token_to_kv_pool_allocator.available_size()
        if gate is None:
            return
        candidate = gate.queue.take(num_free)
        if candidate is None:
            return
        exact_pass = open_pass(self, candidate)
        if exact_pass is None:
            gate.queue.defer(candidate, num_free)
            return
        try:
            exact_pass.step()
            while not exact_pass.is_done and not self._has_arrivals():
                exact_pass.step()
            if exact_pass.is_done:
                gate.complete(candidate, exact_pass.result())
            else:
                gate.give_up(candidate)
        finally:
            exact_pass.close()

    def _has_arrivals(self) -> bool:
        """Whether anything was sent to this scheduler; the next step of the loop answers it. The same on all ranks."""
        self._deferred_input_requests.extend(self.request_receiver.recv_requests())
        return len(self._deferred_input_requests) > 0

    def maybe_sleep_on_idle(self) -> None:
        gate = None if self.weight_updater.offload_tags else self._chunks.gate
        is_busy = gate is not None and gate.queue.next(self.token_to_kv_pool_allocator.available_size()) is not None
        if not is_busy and not self._chunks.keeper.is_waiting:
            super().maybe_sleep_on_idle()

    def flush_cache(self, *args: Any, **kwargs: Any) -> bool:
        # SGLang flushes only while no request waits. A waiting refresh holds nothing and has no reader: it is dropped.
        drop_waiting(self, lambda req: is_refresh(req.rid))
        return super().flush_cache(*args, **kwargs)

    @property
    def _chunks(self) -> ChunkRuntime:
        return known_runtime_of(self.tree_cache)


def _wanted(chunks: ChunkRuntime, req: Req) -> list[Wanted]:
    state = state_of(req)
    if state is None or state.prompt.unsupported:
        return []
    prompt, decision = state.prompt, state.verification.decision
    if decision is not None and decision.step is None:
        return []  # the target wants it computed exactly
    wanted = []
    for missing in chunks.manager.missing(prompt):
        start, end = prompt.options.spans[missing.chunk]
        token_ids, key = req.origin_input_ids[start:end], prompt.keys[missing.chunk]
        wanted.append(Wanted(key, token_ids, prompt.partition, missing.need, missing.held))
    return wanted


def _num_rows(req: Req) -> int:
    """Rows that a waiting request will compute, as far as is known."""
    state = state_of(req)
    plan = None if state is None else state.admission.plan
    return len(req.origin_input_ids) if plan is None else plan.num_rows


def merge(before: list[Req], after: list[Req], held: set[int]) -> list[Req]:
    """The requests that still wait: those in `held` at their old places, the others in SGLang's newest order."""
    merged, rest = [], iter(after)
    left = {id(req) for req in after}
    for req in before:
        if id(req) in held:
            merged.append(req)
        elif id(req) in left:
            merged.append(next(rest))
    return merged + list(rest)
