"""KV of the draft model (speculative decoding), which lies in the same slots as the target's.

Verb: `follow_draft` (from then on, each copy in the target's pool is also made in the draft's pool, with the draft's
own rotation).

The draft model computes the same rows as the target, each from the token behind it and, with EAGLE, from the target's
hidden state. So with every row computed again it holds what it would in stock SGLang. Reused KV is approximate, as in
the target; so is that of a chunk's last token, which was computed from the token behind the chunk. None of this changes
an answer, since the target verifies what is drafted; it only changes how much is accepted.
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
        kernel: as configured.

    Raises:
        StartRefused: the draft's keys cannot be moved.
    """
    kv_pool = draft.token_to_kv_pool
    layers = describe_model(draft.model, draft.model_config.context_len)
    chosen = choose_kernel(kernel, draft, kv_pool, layers)
    assembler.draft = KVAssembler(target, kv_pool, layers.rotaries, chosen)
