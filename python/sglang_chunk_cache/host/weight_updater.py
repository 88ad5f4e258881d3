"""ChunkWeightUpdater: KV of other weights than the model's must not come up again from the tiers below the pool."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_chunk_cache.host.runtime import runtime_of


class ChunkWeightUpdater(SchedulerWeightUpdaterManager):
    """Every way to change the weights ends the tiers and what the gate knows; SGLang itself flushes the pool."""

    __slots__ = ()

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return self._changed(super().update_weights_from_disk(recv_req))

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._changed(super().update_weights_from_distributed(recv_req))

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._changed(super().update_weights_from_tensor(recv_req))

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return self._changed(super().update_weights_from_ipc(recv_req))

    def begin_weight_update(self, recv_req: Any) -> Any:
        return self._changed(super().begin_weight_update(recv_req))

    def _changed(self, result: Any) -> Any:
        chunks = None if self.scheduler is None else runtime_of(self.scheduler.tree_cache)
        if chunks is not None and chunks.tiers is not None:
            chunks.tiers.disable("the weights were changed; start the server anew to have them again.")
        if chunks is not None and chunks.gate is not None:
            chunks.gate.forget()
        return result
