"""ExactPass: the exact prefill of one prompt and its answer, step by step, beside everything that serves requests.

Verbs: `open_pass` (takes slots, if there are so many), `step` (one forward), `result`, `close` (gives all back).

Promises: the radix tree is read and not touched, so nothing is counted as a use and nothing is inserted; nothing is
evicted; no request, batch or metric of SGLang knows of it. It lives within one idle turn of the event loop, so nobody
can evict what it reads, and SGLang's own checks of the pool find nothing taken.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from chunk_cache.gate.selection import Candidate
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.gate.measure import ExactAnswer

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

STEP_LEN = 128
"""Tokens of one step: what a request that comes meanwhile waits for. As long as a decoding step takes, about."""


def open_pass(scheduler: Scheduler, candidate: Candidate) -> ExactPass | None:
    """A pass with slots for all of it; None where there are not so many free."""
    assert candidate.answer is not None
    token_ids = candidate.prompt + candidate.answer[:-1]
    tree, allocator, rows = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    page_size = tree.page_size
    partition = candidate.partition
    # All but the last token of the prompt: its row is what is asked for.
    key = RadixKey(candidate.prompt[:-1], extra_key=partition.extra_key, cache_salt=partition.cache_salt)
    found, node, _ = tree.tree_core.match_full_device_prefix(key)
    prefix_len = found // page_size * page_size
    num_slots = -(-(len(token_ids) - prefix_len) // page_size) * page_size
    if rows.available_size() < 1 or allocator.available_size() < num_slots:
        return None
    slots = allocator.alloc(num_slots)
    assert slots is not None, f"{num_slots} slots of {allocator.available_size()} free ones"
    (row,) = rows.alloc_rows(1)
    prefix = tree.path_device_indices(node)[:prefix_len]
    return ExactPass(scheduler, candidate, token_ids, torch.cat([prefix.to(slots), slots]), prefix_len, row)


class ExactPass:
    """See the head of this file; `open_pass` makes one.

    Args:
        token_ids: the prompt and what was sent behind it, but for the last token.
        slots: `[at least len(token_ids)]`, on the device; from `prefix_len` on its own.
        row: of the pool that maps requests to slots; its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        candidate: Candidate,
        token_ids: array[int],
        slots: torch.Tensor,
        prefix_len: int,
        row: int,
    ) -> None:
        self._scheduler = scheduler
        self._candidate = candidate
        self._token_ids = token_ids
        assert candidate.answer is not None
        self._all_ids = candidate.prompt + candidate.answer
        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        self._req = Req(f"verification {candidate.number}", "", token_ids, params)
        self._req.full_untruncated_fill_ids = token_ids
        self._slots = slots
        self._prefix_len = prefix_len
        self._row = row
        self._end = prefix_len
        self._first_logits: torch.Tensor | None = None
        self._logprobs: list[float] = []
        self._best: list[float] = []
        self._best_ids: list[int] = []
        scheduler.req_to_token_pool.req_to_token[row, : len(token_ids)] = slots[: len(token_ids)].to(torch.int32)

    @property
    def is_done(self) -> bool:
        return self._end == len(self._token_ids)

    def step(self) -> None:
        """One forward of at most `STEP_LEN` tokens; returns when it has ended. A step ends with the prompt.

        It waits on purpose: nobody else has work for the GPU, and no more than one step is ever ahead of a request.
        """
        start, prompt_len = self._end, len(self._candidate.prompt)
        in_prompt = start < prompt_len
        self._end = min(start + STEP_LEN, prompt_len if in_prompt else len(self._token_ids))
        scheduler = self._scheduler
        with scheduler.forward_stream_ctx:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            runner = scheduler.tp_worker.model_runner
            batch = self._batch(start, self._end, with_logprobs=not in_prompt)
            forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
            output = runner.forward(forward_batch).logits_output
            if self._end == prompt_len:
                self._first_logits = output.next_token_logits[0].float().clone()
            float(output.next_token_logits[0, 0])
            if not in_prompt:
                output.finalize_input_logprobs()  # on CUDA they come by pinned memory
                self._logprobs += output.input_token_logprobs.tolist()
                self._best += [values[0] for values in output.input_top_logprobs_val[0]]
                self._best_ids += [ids[0] for ids in output.input_top_logprobs_idx[0]]

    def _batch(self, start: int, end: int, *, with_logprobs: bool) -> ScheduleBatch:
        """A batch of one extend, of a request that exists here only."""
        self._req.extend_end = end
        scheduler, device = self._scheduler, self._slots.device
        length = end - start
        # The logits of a token are compared with the token behind it; that of the last one was sent too.
        behind = self._all_ids[start + 1 : end + 1] if with_logprobs else None
        one = [np.array([value], dtype=np.int64) for value in (self._row, end)]
        input_ids, row, seq_lens, orig_seq_lens = upload(
            [np.array(self._token_ids[start:end], dtype=np.int64), *one, np.array([end], dtype=np.int32)], device
        )
        batch = ScheduleBatch(
            reqs=[self._req],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            model_config=scheduler.model_config,
            device=scheduler.device,
            forward_mode=ForwardMode.EXTEND,
            input_ids=input_ids,
            req_pool_indices=row,
            req_pool_indices_cpu=torch.from_numpy(one[0]),
            seq_lens=seq_lens,
            seq_lens_cpu=torch.from_numpy(one[1]),
            orig_seq_lens=orig_seq_lens,
            seq_lens_sum=end,
            out_cache_loc=self._slots[start:end],
            prefix_lens=[start],
            extend_lens=[length],
            extend_num_tokens=length,
            extend_logprob_start_lens=[0 if with_logprobs else length],
            return_logprob=with_logprobs,
            top_logprobs_nums=[1] if with_logprobs else None,
            token_ids_logprobs=[None] if with_logprobs else None,
            extend_input_logprob_token_ids=torch.tensor(behind, dtype=torch.int64) if behind is not None else None,
            spec_algorithm=scheduler.spec_algorithm,
        )
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
        return batch

    def result(self) -> ExactAnswer:
        """What was found; after the last step."""
        assert self.is_done
        assert self._first_logits is not None
        return ExactAnswer(self._first_logits, self._logprobs, self._best, self._best_ids)

    def close(self) -> None:
        """Gives slots and row back."""
        self._scheduler.token_to_kv_pool_allocator.free(self._slots[self._prefix_len :])
        self._scheduler.req_to_token_pool.free_rows([self._row])
