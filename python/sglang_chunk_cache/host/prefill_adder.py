"""ChunkPrefillAdder: SGLang's prefill admission, which charges a fused request for the rows that it computes.

Promises: a fused request is charged exactly the rows that its forward computes, and no step has more rows than SGLang's
flags allow (`flags/step_limits`). A request with more rows than a step is computed in several, like a prompt in chunked
prefill (`chunk_cache.plan.plan_steps`); one whose rows have no room in this step waits for the next. Nothing overtakes
it in SGLang's own order of the queue, so it does not starve. A request that would have reused chunks evicted waits
while others run that will free room, and is let in if none does. A question that chooses rows is not cut off where a
step has room for it, nor by requests that decode in the same step. A loaded token is never counted as cached.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder

from chunk_cache.methods import METHODS
from chunk_cache.plan.plan_steps import needs_steps, next_step, part_of
from chunk_cache.plan.recompute_plan import RecomputePlan
from sglang_chunk_cache.flags.step_limits import most_unknown_rows, step_len
from sglang_chunk_cache.host.refresh import is_refresh
from sglang_chunk_cache.request.chunk_request import Admission, state_of
from sglang_chunk_cache.start.runtime import known_runtime_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class ChunkPrefillAdder(PrefillAdder):
    chunked_req_limit: int | None

    def __init__(self, *args: Any, num_in_transfer: int = 0, **kwargs: Any) -> None:
        """Takes SGLang's arguments; `num_in_transfer` computed requests will free their room once they are sent."""
        super().__init__(*args, **kwargs)
        self._num_in_transfer = num_in_transfer

    def _replay_len(self, req: Req, prefix_len: int) -> int:
        plan = _loading_plan(req, prefix_len)
        return super()._replay_len(req, prefix_len) + (0 if plan is None else plan.num_load_rows)

    def _select_prefill_admission(self, req: Req, *, total_tokens: int, host_hit_length: int, **kwargs: Any) -> Any:
        if self._takes_kept_room(total_tokens):
            return AddReqResult.NO_TOKEN
        kwargs["total_tokens"] = total_tokens
        state = state_of(req)
        admitted = None if state is None else state.admission
        if admitted is not None and (whole := admitted.load_plan) is not None and needs_steps(whole, step_len()):
            return self._select_first_step(req, admitted, whole, **kwargs)
        kwargs["host_hit_length"] = host_hit_length
        plan = _loading_plan(req, req.prefix_len + host_hit_length)
        rows = 0 if plan is None else plan.num_load_rows
        admission = self._select(req, **kwargs)
        if plan is None or not rows:
            return admission
        if _cuts_question(plan, req, admission):
            admission = AddReqResult.OTHER  # as if there were no room for the rows
        if self.can_run_list:
            if self.rem_chunk_tokens is None and not isinstance(admission, AddReqResult):
                # Without chunked prefill SGLang compares the tail alone with --max-prefill-tokens.
                fits = rows + self.ceil_paged_tokens(admission.extend_len) < self.rem_input_tokens
                return admission if fits else AddReqResult.OTHER
            return admission
        if admission is not AddReqResult.OTHER:
            return admission
        if plan.selection is None and admitted is not None:  # requests that decode beside it take room
            return self._select_first_step(req, admitted, plan, **kwargs)
        # Rows that the forward chooses cannot be cut into steps: the tail is sized as if there were no rows, as far as
        # --max-prefill-tokens allows, and the step is charged for both, so nothing else is admitted to it.
        stock = self._as_stock()
        if _reads_question(plan):
            stock.rem_chunk_tokens = step_len()  # also where requests that decode leave less
        admission = stock._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        admission = dataclasses.replace(admission, replay_len=admission.replay_len + rows)
        return _shortened(admission, self._most_behind(plan))

    def _select(self, req: Req, **kwargs: Any) -> Any:
        """Admits as SGLang does, except that a step never cuts off a second request."""
        admission = super()._select_prefill_admission(req, **kwargs)
        is_cut = not isinstance(admission, AddReqResult) and admission.is_chunked
        return AddReqResult.OTHER if is_cut and self._has_cut(**kwargs) else admission

    def _has_cut(self, *, has_chunked_req: bool = False, **_: Any) -> bool:
        """Whether a request is already cut off and continues in the next step; SGLang can handle one only."""
        return has_chunked_req or self.new_chunked_req is not None

    def _select_first_step(self, req: Req, admitted: Admission, plan: RecomputePlan, **kwargs: Any) -> Any:
        """Admits the first of several steps of a request; `add_chunked_req` adds the others."""
        most = self.rem_chunk_tokens
        assert most is not None, "without chunked prefill nothing needs steps"
        # On a deterministic server the beginning of later steps must not depend on the batch.
        is_late = kwargs["truncation_align_size"] is not None and bool(self.can_run_list)
        if is_late or self._has_cut(**kwargs) or most <= 0:
            return AddReqResult.OTHER
        begin = plan.load_start
        step = next_step(plan, begin, most)
        kwargs["host_hit_length"] = step.load_end - begin
        admission = self._as_stock()._select_prefill_admission(req, **kwargs)
        if isinstance(admission, AddReqResult):
            return admission
        part = part_of(plan, begin, step.load_end) if step.load_end > begin else None
        admitted.cut(part)
        req.host_hit_length = step.load_end - begin  # this is what SGLang has brought in now
        num_rows = 0 if part is None else part.num_load_rows
        end = step.load_end + most - num_rows if step.end is None else step.end
        admission = dataclasses.replace(admission, replay_len=admission.replay_len + num_rows)
        return _shortened(admission, end - step.load_end)

    def _most_behind(self, plan: RecomputePlan) -> int:
        """Most tokens behind rows that the forward chooses. A question stays whole: the plan made sure that it fits."""
        assert plan.selection is not None
        most, length = most_unknown_rows(), plan.prompt_len - plan.load_end
        if most is None or _reads_question(plan):
            return length
        room = most - plan.num_load_rows
        return max(self.page_size, room - room % self.page_size)

    def add_chunked_req(self, req: Req) -> Any:
        state = state_of(req)
        plan = None if state is None or not state.admission.in_steps else state.admission.load_plan
        most = self.rem_chunk_tokens
        if state is None or plan is None or most is None or req.prefix_len >= plan.load_end:
            return super().add_chunked_req(req)
        self.rem_chunk_tokens += max(0, 1 - most)  # even if decoding requests leave no room
        most = max(most, 1)
        if self.chunked_req_limit is not None:
            most = min(most, self.chunked_req_limit)
        step = next_step(plan, req.prefix_len, most)
        if step.load_end > req.prefix_len:
            part = self.tree_cache.load_part(req, step.load_end)
            if part is None:
                return super().add_chunked_req(req)
            num_rows = part.num_load_rows
            most = most - num_rows if part.selection is None else self._most_behind(part)
            if _reads_question(part):
                self.rem_chunk_tokens += max(0, most - self.rem_chunk_tokens)  # also where others decode
        else:
            num_rows = 0
        self.chunked_req_limit = most if step.end is None else step.end - req.prefix_len
        left = super().add_chunked_req(req)
        state.admission.reach(req.extend_end)
        if left is not None:
            self._reserve_rest(req)
        self.rem_chunk_tokens -= num_rows
        self.rem_input_tokens -= num_rows
        return left

    def _reserve_rest(self, req: Req) -> None:
        """Keeps the memory of a request's later steps from others: unlike stock's, its steps leave room for more."""
        num_left = len(req.full_untruncated_fill_ids) - req.extend_end
        self.memory_budget.reserve(num_left, min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS))

    def _as_stock(self) -> PrefillAdder:
        """A copy of this adder as SGLang's own class, which knows of no rows: to select by, not to commit to."""
        stock = copy.copy(self)
        stock.__class__ = PrefillAdder
        return stock

    def _takes_kept_room(self, num_tokens: int) -> bool:
        """Whether `num_tokens` more would have reused chunks evicted although requests run that will free room."""
        running = bool(self.running_batch and self.running_batch.reqs) or self._num_in_transfer > 0
        if self.preempt_list or not (self.can_run_list or running):
            return False
        chunks = known_runtime_of(self.tree_cache)
        capacity = self.tree_cache.token_to_kv_pool_allocator.size
        return chunks.manager.takes_kept_room(num_tokens, self.rem_total_tokens, capacity)

    def _commit_prefill_admission(self, req: Req, admission: Any, mamba_gap_reserve: int) -> None:
        super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
        state = state_of(req)
        if state is None or state.admission.plan is None:
            return
        state.admission.reach(req.extend_end)
        if state.admission.in_steps and admission.is_chunked:
            self._reserve_rest(req)
        plan, load = state.admission.plan, state.admission.load
        if load is not None:
            self._uncount_loaded(req, len(load.slots))
        if state.reported is None:
            state.report(plan)
            chunks = known_runtime_of(self.tree_cache)
            if not is_refresh(req.rid):
                chunks.metrics.count_plan(plan)
            if plan.fallback_reason is not None and state.options.mode == "auto":
                how = f"is recomputed by {plan.method}" if plan.num_reused else "reuses no chunk"
                logger.info("Chunk cache: %s %s (%s)", req.rid, how, plan.fallback_reason)
            # No verification with LoRA: the adapter may be gone when the server is idle.
            is_fused = load is not None or state.admission.in_steps
            if chunks.gate is not None and is_fused and req.lora_id is None and state.packing.kept is None:
                chunks.gate.admit(req.rid, req.origin_input_ids, state, plan)

    def _uncount_loaded(self, req: Req, load_len: int) -> None:
        """Counts loaded tokens as input, not as cached: a load is neither a device hit nor a host hit."""
        self.log_hit_tokens -= load_len
        self.log_input_tokens += load_len
        if req.retracted_stain:
            self.reprocessed_log_hit_tokens -= load_len
            self.reprocessed_log_input_tokens += load_len
        else:
            self.log_host_hit_tokens -= load_len


def _loading_plan(req: Req, prefix_len: int) -> RecomputePlan | None:
    """The plan of a request that brings chunks in, if its extend starts at `prefix_len`, behind them; else None."""
    state = state_of(req)
    plan = None if state is None or req.kv.holds_kv else state.admission.load_plan
    return plan if plan is not None and prefix_len == plan.load_end else None


def _shortened(admission: Any, most: int) -> Any:
    """The admission, cut to at most `most` tokens; the rest comes in the next step."""
    if admission.extend_len <= most:
        return admission
    return dataclasses.replace(admission, extend_len=most, is_chunked=True, max_new_tokens=0)


def _reads_question(plan: RecomputePlan) -> bool:
    """Whether the question chooses rows of the plan during the forward."""
    return plan.selection is not None and METHODS[plan.selection.method].reads_question


def _cuts_question(plan: RecomputePlan, req: Req, admission: Any) -> bool:
    """Whether an admission cuts off the tail behind the rows although the question at its end chooses them."""
    if isinstance(admission, AddReqResult):
        return False
    is_cut = admission.prefix_len + admission.extend_len < len(req.full_untruncated_fill_ids)
    return is_cut and _reads_question(plan)
