"""ExactPass: the exact prefill of one prompt and its answer, step by step, apart from everything that serves requests.

Verbs: `open_pass` (takes slots, if enough are free), `step` (one forward), `result`, `close` (gives all back).

Promises: the radix tree is read and not touched, so nothing is counted as a use and nothing is inserted; nothing is
evicted; no request, batch or metric of SGLang knows of it. It lives within one idle turn of the event loop, so nobody
can evict what it reads, and SGLang's own checks of the pool find nothing taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from chunk_cache.gate.verification_queue import Candidate
from sglang_chunk_cache.forward.own_batch import OwnPrompt, take_slots
from sglang_chunk_cache.verification.measure import ExactAnswer

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

STEP_LEN = 128
"""Tokens of one step, for which a request that comes meanwhile waits: about as long as a decoding step takes."""


def open_pass(scheduler: Scheduler, candidate: Candidate) -> ExactPass | None:
    """A pass with slots for all of its tokens; None if too few are free."""
    assert candidate.answer is not None
    token_ids = candidate.prompt + candidate.answer[:-1]
    tree = scheduler.tree_cache
    page_size = tree.page_size
    partition = candidate.partition
    # The last token of the prompt is left out, since its logits are wanted.
    key = RadixKey(candidate.prompt[:-1], extra_key=partition.extra_key, cache_salt=partition.cache_salt)
    found, node, _ = tree.tree_core.match_full_device_prefix(key)
    prefix_len = found // page_size * page_size
    taken = take_slots(scheduler, len(token_ids) - prefix_len)
    if taken is None:
        return None
    slots, row = taken
    prefix = tree.path_device_indices(node)[:prefix_len]
    name = f"verification {candidate.number}"
    prompt = OwnPrompt(scheduler, name, token_ids, torch.cat([prefix.to(slots), slots]), row, prefix_len)
    return ExactPass(scheduler, candidate, prompt, prefix_len)


class ExactPass:
    """See the head of this file; `open_pass` makes one.

    Args:
        prompt: the prompt and what was sent behind it, but for the last token; its first `prefix_len` tokens are there.
    """

    def __init__(self, scheduler: Scheduler, candidate: Candidate, prompt: OwnPrompt, prefix_len: int) -> None:
        self._scheduler = scheduler
        self._candidate = candidate
        assert candidate.answer is not None
        self._all_ids = candidate.prompt + candidate.answer
        self._prompt = prompt
        self._end = prefix_len
        self._first_logits: torch.Tensor | None = None
        self._logprobs: list[float] = []
        self._best: list[float] = []
        self._best_ids: list[int] = []

    @property
    def is_done(self) -> bool:
        return self._end == len(self._prompt.token_ids)

    def step(self) -> None:
        """Computes one forward of at most `STEP_LEN` tokens and waits for it; no forward spans prompt and answer.

        It waits on purpose: nobody else has work for the GPU, and no more than one step is ever ahead of a request.
        """
        start, prompt_len = self._end, len(self._candidate.prompt)
        in_prompt = start < prompt_len
        self._end = min(start + STEP_LEN, prompt_len if in_prompt else len(self._prompt.token_ids))
        scheduler = self._scheduler
        with scheduler.forward_stream_ctx:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            runner = scheduler.tp_worker.model_runner
            # The logits of a token are compared with the token behind it; the one behind the last was sent too.
            behind = None if in_prompt else self._all_ids[start + 1 : self._end + 1]
            batch = self._prompt.batch(np.arange(start, self._end), behind)
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

    def result(self) -> ExactAnswer:
        """What was found; after the last step."""
        assert self.is_done
        assert self._first_logits is not None
        return ExactAnswer(self._first_logits, self._logprobs, self._best, self._best_ids)

    def close(self) -> None:
        """Gives slots and row back."""
        self._prompt.close()
