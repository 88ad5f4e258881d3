"""SGLang's batch of a forward that extends some requests, for tests that call a backend themselves: `extend_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


def extend_batch(
    pool_rows: Sequence[int], kv_lens: Sequence[int], row_lens: Sequence[int], slots: torch.Tensor, **more: Any
) -> ForwardBatch:
    """The last `row_lens` of `kv_lens` tokens of each request are computed, into `slots`; `more` fields as they are."""
    seq_lens = torch.tensor(kv_lens)
    prefix_lens = [kv_len - row_len for kv_len, row_len in zip(kv_lens, row_lens, strict=True)]
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(row_lens),
        input_ids=torch.zeros(sum(row_lens), dtype=torch.int64),
        req_pool_indices=torch.tensor(pool_rows),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=sum(kv_lens),
        out_cache_loc=slots,
        extend_num_tokens=sum(row_lens),
        extend_seq_lens=torch.tensor(row_lens, dtype=torch.int32),
        extend_seq_lens_cpu=list(row_lens),
        extend_prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32),
        extend_prefix_lens_cpu=prefix_lens,
        extend_start_loc=torch.tensor(np.cumsum([0, *row_lens[:-1]]), dtype=torch.int32),
        **more,
    )
