"""ChunkWeightUpdater: KV that was computed with other weights is not reused.

Exact prefixes stay where the client asked for it (`"flush_cache": false`), as in stock SGLang; chunks never do. A LoRA
adapter needs nothing here: SGLang names it anew when it is loaded, so its chunks have other keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_chunk_cache.kv.ranks import max_over_ranks
from sglang_chunk_cache.start.runtime import runtime_of

_NOTHING_LOADED = ("Failed to get weights iterator", "Failed to get model loader")
"""Beginnings of SGLang's messages for an update from disk that failed before a weight was written. What SGLang calls
rolled back is not among them: it loads from the new folder once more."""


class ChunkWeightUpdater(SchedulerWeightUpdaterManager):
    """Every way to change the weights drops the stored chunks and what the gate knows, and turns the tiers off.

    An update that certainly loaded nothing on any rank changes nothing.
    """

    __slots__ = ()

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        result = super().update_weights_from_disk(recv_req)
        is_refused = not result.success and result.message.startswith(_NOTHING_LOADED)
        # A draft model may fail with the same message after the target was loaded.
        is_untouched = is_refused and len(self._select_runners()) == 1
        (is_changed,) = max_over_ranks(self.tp_cpu_group)(np.array([not is_untouched], dtype=np.int64))
        return self._changed(result) if is_changed else result

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._changed_within_session(super().update_weights_from_distributed(recv_req))

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._changed_within_session(super().update_weights_from_tensor(recv_req))

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return self._changed(super().update_weights_from_ipc(recv_req))

    def begin_weight_update(self, recv_req: Any) -> Any:
        result = super().begin_weight_update(recv_req)
        return self._changed(result) if result.success else result

    def end_weight_update(self, recv_req: Any) -> Any:
        # Within a session others may write the weights (RDMA) while requests run.
        result = super().end_weight_update(recv_req)
        return self._changed(result) if result.success else result

    def check_weights(self, recv_req: Any) -> Any:
        result = super().check_weights(recv_req)
        return self._changed(result) if recv_req.action == "reset_tensors" else result

    def _changed_within_session(self, result: Any) -> Any:
        """Calls `_changed`, unless SGLang refused an update outside of a session (ranks begin and end these alike)."""
        return result if self._session is None and not result.success else self._changed(result)

    def _changed(self, result: Any) -> Any:
        chunks = None if self.scheduler is None else runtime_of(self.scheduler.tree_cache)
        if chunks is not None:
            chunks.forget_weights()
        return result
