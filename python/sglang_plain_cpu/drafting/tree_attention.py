"""Attention of draft trees on `torch_native`, which supports prompts and single tokens only.

`TreeAttention` verifies trees (each token sees the prompt and its ancestors in the tree); `DraftSteps` holds one
`TreeAttention` per step of a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_plain_cpu import torch_native

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TreeAttention(TorchNativeAttnBackend):
    """SGLang's backend, which also verifies trees and takes steps of a draft.

    Attributes:
        branches: for a step of a draft: slots of each branch `[num_branches, max_len]` and how many of them it sees.
    """

    branches: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        args = q, k, v, layer, forward_batch, save_kv_cache
        if forward_batch.forward_mode.is_target_verify():
            return torch_native.forward(TreeAttention._verify, self, *args, **kwargs)
        out: torch.Tensor = super().forward_extend(*args, **kwargs)
        return out

    def _verify(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        pool, window = self.token_to_kv_pool, layer.sliding_window_size
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        num_reqs, num_nodes = forward_batch.batch_size, forward_batch.spec_info.draft_token_num
        queries = q.view(num_reqs, num_nodes, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        trees = forward_batch.spec_info.custom_mask[: num_reqs * num_nodes**2].view(num_reqs, num_nodes, num_nodes)
        positions = forward_batch.positions.view(num_reqs, num_nodes)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        outs = []
        for i, (row, length) in enumerate(
            zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        ):
            slots = self.req_to_token_pool.req_to_token[row, : length + num_nodes]
            seen = torch.cat([torch.ones(num_nodes, length, dtype=torch.bool), trees[i]], 1)
            if window is not None and window > -1:
                key_positions = torch.cat([torch.arange(length), positions[i]])
                seen &= key_positions >= positions[i][:, None] - window
            out = torch_native.attention(
                queries[i : i + 1],
                keys[slots].transpose(0, 1)[None].to(q.dtype),
                values[slots].transpose(0, 1)[None].to(q.dtype),
                attn_mask=seen,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                scale=layer.scaling,
            )
            outs.append(out[0].transpose(0, 1).reshape(num_nodes, -1))
        return torch.cat(outs)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.branches is not None:
            req_to_token, seq_lens = self.branches
            req_pool_indices = torch.arange(len(seq_lens))
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
        )


class DraftSteps:
    """The attention of a draft: one backend per step that attends, for `topk` branches per request."""

    def __init__(self, model_runner: ModelRunner, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [TreeAttention(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Sets what each branch sees at each step: the prompt, and its own slots behind it."""
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        longest = int(forward_batch.seq_lens.max()) + self.num_steps
        branches = [
            torch.cat([table[row, :length], table[row, first : first + longest - length]])
            for row, length in zip(
                forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True
            )
            for first in range(length, length + self.topk * self.num_steps, self.num_steps)
        ]
        slots = torch.stack(branches)
        lens = forward_batch.seq_lens.repeat_interleave(self.topk)
        for step, backend in enumerate(self.attn_backends):
            backend.branches = (slots, lens + step + 1)


def draft_decode_backend(factory: Any) -> DraftSteps | None:
    """Replaces `DraftBackendFactory.create_decode_backend`; None if no step of a draft attends."""
    if factory.speculative_num_steps <= 1:
        return None
    return DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def no_draft_extend_backend(_factory: Any) -> None:
    """None, because the draft runner's own backend attends for accepted tokens."""
