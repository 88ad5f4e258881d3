"""What is wrapped of `SchedulerWeightUpdaterManager`: KV of the old weights is of no use."""

from __future__ import annotations

from typing import Any

from sglang_chunk_cache.host.runtime import runtime_of


def weights_changed(_result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER the updates, whether they say that they succeeded or not."""
    chunks = runtime_of(updater.scheduler.tree_cache)
    if chunks is not None and chunks.tiers is not None:
        chunks.tiers.disable("the weights were changed; start the server anew to have them again.")
