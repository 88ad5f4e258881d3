"""ChunkPrefillAdder: SGLang's prefill scheduler, which counts a fused request as what it is.

Promises: a fused request is charged the rows that its forward computes, no more and no less. The loaded range is not
split over steps, so a request with more rows than `--chunked-prefill-size` waits until it is the only one of a step
and then goes whole; nothing overtakes it in SGLang's own order of the queue, so it does not starve. A request that
would take the room of reused chunks waits for one that runs, never for nothing. A question that chooses rows is not
cut off where a step has room for it. A loaded token is never counted as cached.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from chunk_cache.methods import METHODS
from sglang_chunk_cache.host.refresh import is_refresh
from sglang_chunk_cache.request.chunk_request import state_of
from sglang_chunk_cache.start.runtime import runtime_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ChunkPrefillAdder(PrefillAdder):
    """See the head of this file."""

    _sized_without_rows: Req | None = None
    """A request whose tail is being sized as if there were no rows in front of it."""

    def __init__(self, *args: Any, num_in_transfer: int = 0, **kwargs: Any) -> None:
        """As SGLang's; `num_in_transfer` requests were computed and give their room back once they were sent."""
        super().__init__(*args, **kwargs)
        self._num_in_transfer = num_in_transfer

    def _replay_len(self, req: Req, prefix_len: int) -> int:
        rows = 0 if req is self._sized_without_rows else _rows_of_load(req, prefix_len)
        return super()._replay_len(req, prefix_len) + rows

    def _select_prefill_admission(self, req: Req, *, total_tokens: int, host_hit_length: int, **kwargs: Any) -> Any:
        if self._takes_kept_room(total_tokens):
            return AddReqResult.NO_TOKEN
        kwargs |= {"total_tokens": total_tokens, "host_hit_length": host_hit_length}
        rows = _rows_of_load(req, req.prefix_len + host_hit_length)
        admission = super()._select_prefill_admission(req, **kwargs)
        if not rows:
            return admission
        if self._cuts_question(req, admission):
            if self.can_run_list:
                return AddReqResult.OTHER
            admission = AddReqResult.OTHER  # as if there were no room for the rows
        if self.can_run_list:
            if self.rem_chunk_tokens is None and not isinstance(admission, AddReqResult):
                # Without chunked prefill SGLang compares the tail alone with --max-prefill-tokens.
                fits = rows + self.ceil_paged_tokens(admission.extend_len) < self.rem_input_tokens
                return admission if fits else AddReqResult.OTHER
            return admission
        if admission is not AddReqResult.OTHER:
            return admission
        # An empty step has no room for the rows and at least a page of the tail, so it never will have: the tail is
        # sized as if there were no rows, and the step is charged for both, which closes it.
        self._sized_without_rows = req
        try:
            admission = super()._select_prefill_admission(req, **kwargs)
        finally:
            self._sized_without_rows = None
        if isinstance(admission, AddReqResult):
            return admission
        return dataclasses.replace(admission, replay_len=admission.replay_len + rows)

    def _cuts_question(self, req: Req, admission: Any) -> bool:
        """Whether a step has room for a part only of what follows the rows, and these are chosen by the end of it."""
        if isinstance(admission, AddReqResult):
            return False
        state = state_of(req)
        assert state is not None
        assert state.plan is not None
        selection = state.plan.selection
        is_cut = admission.prefix_len + admission.extend_len < len(req.full_untruncated_fill_ids)
        return is_cut and selection is not None and METHODS[selection.method].reads_question

    def _takes_kept_room(self, num_tokens: int) -> bool:
        """Whether so many tokens more would have reused chunks evicted while others run that will give theirs back.

        Without this a burst fills the KV pool with running requests, each finds fewer chunks, computes more, and stays
        longer: throughput falls where load is highest. A request that has no room beside them even when it runs alone
        would wait for a server that is empty, and is left to SGLang's own rule.
        """
        running = bool(self.running_batch and self.running_batch.reqs) or self._num_in_transfer > 0
        if self.preempt_list or not (self.can_run_list or running):
            return False
        chunks = runtime_of(self.tree_cache)
        assert chunks is not None
        capacity = self.tree_cache.token_to_kv_pool_allocator.size
        num_kept = chunks.manager.num_kept_tokens(capacity)
        if num_tokens > capacity - num_kept:
            return False
        return self.rem_total_tokens - num_tokens < num_kept

    def _commit_prefill_admission(self, req: Req, admission: Any, mamba_gap_reserve: int) -> None:
        super()._commit_prefill_admission(req, admission, mamba_gap_reserve)
        state = state_of(req)
        if state is None or state.plan is None:
            return
        if state.load_due:
            self._uncount_loaded(req, state.load_len)
        if state.reported is None:
            state.reported = state.plan
            chunks = runtime_of(self.tree_cache)
            assert chunks is not None
            if not is_refresh(req.rid):
                chunks.metrics.count_plan(state.plan)
            # The adapter may be gone when the server is idle.
            if chunks.gate is not None and state.load_due and req.lora_id is None and state.kept is None:
                chunks.gate.admit(req.rid, req.origin_input_ids, state)

    def _uncount_loaded(self, req: Req, load_len: int) -> None:
        """A load is neither a device nor a host hit: the prompt tokens in it were not found, they were made."""
        self.log_hit_tokens -= load_len
        self.log_input_tokens += load_len
        if req.retracted_stain:
            self.reprocessed_log_hit_tokens -= load_len
            self.reprocessed_log_input_tokens += load_len
        else:
            self.log_host_hit_tokens -= load_len


def _rows_of_load(req: Req, prefix_len: int) -> int:
    """Rows that the forward adds in front of an extend that starts at `prefix_len`."""
    state = state_of(req)
    if state is None or state.plan is None or state.load_len == 0 or req.kv.holds_kv:
        return 0
    return state.plan.num_load_rows if prefix_len == state.plan.load_end else 0
