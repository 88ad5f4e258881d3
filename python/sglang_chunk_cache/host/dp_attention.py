"""ChunkDPAttnAdapter: what ranks of data-parallel attention (`--attn-dp-size`) tell each other before a step.

Each rank attends for its own requests; all ranks compute the other layers together. So the number of tokens that a rank
announces must be the one that its forward has at every layer. Verb: `telling_rows` (replaces SGLang's adapter).
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter

from sglang_chunk_cache.forward.added_rows import num_due_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class ChunkDPAttnAdapter(SchedulerDPAttnAdapter):
    """Announces the rows that are due too, which the batch does not have yet."""

    __slots__ = ()

    def prepare_mlp_sync_batch(self, local_batch: ScheduleBatch | None) -> ScheduleBatch | None:
        num_rows = 0 if local_batch is None else num_due_rows(local_batch)
        if local_batch is None or not num_rows:
            return super().prepare_mlp_sync_batch(local_batch)
        num_tokens = local_batch.extend_num_tokens
        local_batch.extend_num_tokens = num_tokens + num_rows
        try:
            return super().prepare_mlp_sync_batch(local_batch)
        finally:
            local_batch.extend_num_tokens = num_tokens


def telling_rows(adapter: SchedulerDPAttnAdapter) -> ChunkDPAttnAdapter:
    """The same adapter as a `ChunkDPAttnAdapter`."""
    return ChunkDPAttnAdapter(**{field.name: getattr(adapter, field.name) for field in fields(adapter)})
