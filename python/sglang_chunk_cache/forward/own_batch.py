"""OwnBatch: forwards of prompts that no request asked for, apart from everything that serves requests.

Verbs: `take_slots` (slots and a row, if there are enough), `OwnPrompt.batch` (an extend of some of its tokens), `close`
(gives all back).

With data-parallel attention all ranks call for batches of equal lengths at the same time.

Promises: the radix tree is not touched, nothing is evicted, and no request, batch or metric of SGLang knows of it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kernel_ext.transfer import upload

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def take_slots(scheduler: Scheduler, num_tokens: int) -> tuple[torch.Tensor, int] | None:
    """Free slots for so many tokens, in whole pages, and a row of the request pool; None where they are too few."""
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    page_size = scheduler.tree_cache.page_size
    num_slots = -(-num_tokens // page_size) * page_size
    if rows.available_size() < 1 or allocator.available_size() < num_slots:
        return None
    slots = allocator.alloc(num_slots)
    assert slots is not None, f"{num_slots} slots of {allocator.available_size()} free ones"
    (row,) = rows.alloc_rows(1)
    return slots, row


class OwnPrompt:
    """Token ids with a place in the KV pool.

    Args:
        name: for logs.
        token_ids: all of the prompt.
        slots: `[at least len(token_ids)]`, on the device; its own from `num_shared` on.
        row: of the pool that maps requests to slots; its own.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, token_ids: array[int], slots: torch.Tensor, row: int, num_shared: int = 0
    ) -> None:
        self._scheduler = scheduler
        self.token_ids = token_ids
        self.row, self._num_shared = row, num_shared
        self._states = _states_for(scheduler.req_to_token_pool, row)
        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        self._req = Req(name, "", token_ids, params)
        self._req.full_untruncated_fill_ids = token_ids
        self.move(slots)

    def move(self, slots: torch.Tensor) -> None:
        """Moves the prompt to these slots; those that it had are now the caller's."""
        num_tokens, self.slots = len(self.token_ids), slots
        places = slots[:num_tokens].to(torch.int32)
        self._scheduler.req_to_token_pool.req_to_token[self.row, :num_tokens] = places

    def batch(self, positions: npt.NDArray[np.int64], behind: array[int] | None = None) -> ScheduleBatch:
        """A batch of one extend, which computes `positions` (ascending) of a request that exists here only.

        Args:
            behind: the token behind each position, whose log-probability is wanted; None = none is.
        """
        scheduler, device = self._scheduler, self.slots.device
        end, length = int(positions[-1]) + 1, len(positions)
        self._req.extend_end = end
        ids = np.asarray(self.token_ids, dtype=np.int64)[positions]
        one = [np.array([value], dtype=np.int64) for value in (self.row, end)]
        input_ids, at, row, seq_lens, orig_seq_lens = upload(
            [ids, positions, *one, np.array([end], dtype=np.int32)], device
        )
        with_logprobs = behind is not None
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
            out_cache_loc=self.slots[at],
            prefix_lens=[end - length],
            extend_lens=[length],
            extend_num_tokens=length,
            extend_logprob_start_lens=[0 if with_logprobs else length],
            return_logprob=with_logprobs,
            top_logprobs_nums=[1] if with_logprobs else None,
            token_ids_logprobs=[None] if with_logprobs else None,
            extend_input_logprob_token_ids=torch.tensor(behind, dtype=torch.int64) if with_logprobs else None,
            multimodal_inputs=[None],
            mamba_clear_indices=self._states,
            spec_algorithm=scheduler.spec_algorithm,
        )
        if (parallel := get_parallel()).attn_dp_enabled:  # as SGLang notes once its ranks have told each other
            batch.global_num_tokens = [length] * parallel.num_dp_ranks
            batch.global_num_tokens_for_logprob = [length if with_logprobs else 1] * parallel.num_dp_ranks
            batch.is_extend_in_batch = True
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
        return batch

    def close(self) -> None:
        """Gives slots and row back."""
        self._scheduler.token_to_kv_pool_allocator.free(self.slots[self._num_shared :])
        self._scheduler.req_to_token_pool.free_rows([self.row])
        if self._states is not None:
            self._scheduler.req_to_token_pool.mamba_allocator.free(self._states)


def _states_for(rows: Any, row: int) -> torch.Tensor | None:
    """Allocates a slot for the states of a row, `[1]`; each batch clears them first. None if the model has none."""
    if not hasattr(rows, "mamba_allocator"):
        return None
    slot: torch.Tensor | None = rows.mamba_allocator.alloc(1)
    assert slot is not None, "an idle server has room for the states of a prompt"
    rows.req_index_to_mamba_index_mapping[row] = slot[0].to(torch.int32)
    return slot
