"""The KV of a model that drafts (speculative decoding), which lies in the slots of the target's.

Verb: `follow_draft` (from then on, what is copied in the target's pool is copied in the draft's, turned by the draft's
own rotation).

A draft computes the rows that the target computes, each from the token behind it and, with EAGLE, from the target's
hidden state. So with every row computed again it holds what stock SGLang's would. What is reused is approximate as the
target's is, and so is the last token of a chunk, which was drafted from the token behind it. None of it changes a
token: what is drafted is verified by the target; only how much of it is accepted depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_chunk_cache.forward.kernels import choose_kernel
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.model_layers import describe_model

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def follow_draft(assembler: KVAssembler, target: ModelRunner, draft: ModelRunner, kernel: str) -> None:
    """Has `assembler` copy in the pool of `draft` too.

    Args:
        kernel: as asked for in the configuration.

    Raises:
        StartRefused: the draft's keys cannot be moved.
    """
    kv_pool = draft.token_to_kv_pool
    layers = describe_model(draft.model, draft.model_config.context_len)
    chosen = choose_kernel(kernel, draft, kv_pool, layers)
    assembler.draft = KVAssembler(target, kv_pool, layers.rotaries, chosen)
