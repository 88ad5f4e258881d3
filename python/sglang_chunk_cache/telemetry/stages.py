"""Stages of serving a request: how long each takes is a histogram, and a span where SGLang traces (`--enable-trace`).

Verbs: `stage` (measures what runs inside it), `note_stage` (notes a stage that has ended). `STAGES` has their names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.observability.trace import TraceSliceContext

from sglang_chunk_cache.telemetry.chunk_metrics import ChunkMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@contextmanager
def stage(metrics: ChunkMetrics, name: str, reqs: Sequence[Req]) -> Iterator[dict[str, Any]]:
    """Measures what runs inside; entries of the yielded dictionary become attributes of the spans."""
    begin_ns = time.time_ns()
    attributes: dict[str, Any] = {}
    yield attributes
    note_stage(metrics, name, reqs, begin_ns, attributes)


def note_stage(
    metrics: ChunkMetrics, name: str, reqs: Sequence[Req], begin_ns: int, attributes: dict[str, Any] | None = None
) -> None:
    """Notes one stage of some requests, from `begin_ns` (since 1970) until now."""
    end_ns = time.time_ns()
    metrics.observe(name, (end_ns - begin_ns) / 1e9)
    for req in reqs:
        trace = req.time_stats.trace_ctx
        if trace.tracing_enable:
            trace.trace_slice(TraceSliceContext(f"chunk_cache_{name}", begin_ns, end_ns, attrs=attributes))
