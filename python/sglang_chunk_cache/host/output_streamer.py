"""ChunkOutputStreamer: sends the reply of each request once, with the first output of a stream, else with the last."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_chunk_cache.request.chunk_request import PARAM_NAME, state_of
from sglang_chunk_cache.request.reply import reply_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ChunkOutputStreamer(SchedulerOutputStreamer):
    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        """One list per request: the reply as JSON, which every transport of SGLang can carry, or nothing."""
        values = [_due_reply(req) for req in reqs]
        return {PARAM_NAME: values} if any(values) else super().build_additional_customized_info(reqs)


def _due_reply(req: Req) -> list[str]:
    state = state_of(req)
    if state is None or state.is_replied or state.reported is None or not (req.stream or req.finished()):
        return []
    state.is_replied = True
    return [json.dumps(reply_of(state, state.reported, has_ended=req.finished()))]
