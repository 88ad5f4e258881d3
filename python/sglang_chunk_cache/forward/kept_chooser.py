"""KeptChooser: which tokens of prompts decoding keeps, by the attention of each prompt's last tokens (SnapKV).

Verbs: `plan` (the prompts whose last tokens a forward computes), `observe` (one layer), `finish` (chooses for prompts
that have ended), `choose_kept` (by scores).

Promises: the forward's result is untouched. A row sees only keys in front of it, so a window that chunked prefill cuts
is scored where its rows are computed. Scores live until the prompt ends, the choice until the request is packed; K is
gathered one layer and one KV head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from chunk_cache.options.kept_tokens import POOLING_LEN, WINDOW_LEN, KeptTokens
from sgl_kernel_ext.attention_mass import attention_mass
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.kv.layer_kv import LayerKV
from sglang_chunk_cache.kv.packing import Packing
from sglang_chunk_cache.request.chunk_request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class _Job:
    """The last `num_rows` rows of request `request`, which belong to its window; they see the keys in `slots`."""

    packing: Packing
    kept: KeptTokens
    request: int
    num_rows: int
    slots: torch.Tensor
    is_last: bool


class KeptChooser:
    def __init__(self, jobs: list[_Job], kv_pool: Any, kernel: str, num_layers: int) -> None:
        self._jobs = jobs
        self._kv_pool = kv_pool
        self._kernel = kernel
        self._num_layers = num_layers

    @classmethod
    def plan(cls, batch: ScheduleBatch, kv_pool: Any, kernel: str, num_layers: int) -> KeptChooser | None:
        """The chooser for a forward of `batch`; None if no row of a window is computed in it."""
        jobs = []
        pool_rows = batch.req_pool_indices_cpu.tolist()
        for i, req in enumerate(batch.reqs):
            state = state_of(req)
            if state is None or state.packing.kept is None:
                continue
            end = batch.prefix_lens[i] + batch.extend_lens[i]
            prompt_len = len(req.full_untruncated_fill_ids)
            num_rows = end - max(batch.prefix_lens[i], prompt_len - WINDOW_LEN)
            if num_rows > 0:
                slots = batch.req_to_token_pool.req_to_token[pool_rows[i], :end].to(torch.int64)
                jobs.append(_Job(state.packing, state.packing.kept, i, num_rows, slots, end == prompt_len))
        return cls(jobs, kv_pool, kernel, num_layers) if jobs else None

    def observes(self, layer_id: int) -> bool:
        """True: every layer keeps tokens of its own."""
        return True

    def observe(self, seen: ObservedRows) -> None:
        """Adds one layer."""
        layer, row_lens = seen.layer, seen.row_lens
        num_kv_heads = layer.tp_k_head_num
        q = seen.q.view(-1, num_kv_heads, layer.tp_q_head_num // num_kv_heads, layer.qk_head_dim)
        sinks = [None] * num_kv_heads if seen.sinks is None else seen.sinks.view(num_kv_heads, -1)
        stored = LayerKV.of(self._kv_pool, layer)
        for job in self._jobs:
            begin, end = job.kept.begin, job.kept.end
            scores_of = job.packing.scores_for(job.kept, self._num_layers, num_kv_heads, q.device)
            last = sum(row_lens[: job.request + 1])  # the rows of an extend never leave, and are a request's last
            rows = slice(last - job.num_rows, last)
            for head, scores in enumerate(scores_of[layer.layer_id]):
                received, _ = attention_mass(
                    q[rows, head],
                    stored.k[job.slots, head : head + 1],
                    seen.positions[rows],
                    sm_scale=layer.scaling,
                    logit_cap=layer.logit_cap,
                    k_scale=stored.k_scale,
                    sinks=sinks[head],
                    backend=self._kernel,
                )
                scores += received[begin:end]

    def finish(self) -> None:
        """Chooses for the prompts that have ended."""
        for job in self._jobs:
            scores = job.packing.take_scores() if job.is_last else None
            if scores is not None:
                job.packing.choose(choose_kept(scores, job.kept.room) + job.kept.begin)


def choose_kept(scores: torch.Tensor, room: int) -> torch.Tensor:
    """`[..., room]` int64: ascending places of the best of `scores` `[..., n]`; of equal scores the earlier one.

    A token counts with the highest score among itself and its neighbours (max-pooling).
    """
    flat = scores.reshape(-1, 1, scores.shape[-1])
    pooled = torch.nn.functional.max_pool1d(flat, POOLING_LEN, stride=1, padding=POOLING_LEN // 2)
    order = pooled.view_as(scores).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :room].sort(dim=-1).values
