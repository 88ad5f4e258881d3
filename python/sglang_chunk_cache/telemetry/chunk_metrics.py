"""ChunkMetrics: what the chunk cache does with requests, as Prometheus metrics."""

from __future__ import annotations

from chunk_cache.plan.recompute_plan import RecomputePlan
from sglang_chunk_cache.telemetry.meters import Meters, counter, histogram

STAGES = {
    "planning": "Seconds in which it was decided what happens to every token of a request.",
    "loading": "Seconds that requests were held in the queue until their chunks, or the selector's scores, were there.",
    "assembling": "Seconds of the host in which KV of chunks was copied to its new place, per batch.",
}
_SECONDS = [m * 10**e for e in range(-5, 2) for m in (1, 2, 5)]
_METERS = {
    **{name: histogram(f"{name}_seconds", text, buckets=_SECONDS) for name, text in STAGES.items()},
    "saved": histogram(
        "saved_seconds", "Seconds of prefill that reuse was estimated to spare a request with marks.", buckets=_SECONDS
    ),
    "chunks": counter("chunks_total", "Marked chunks of requests, as planned at admission.", "status", "reason"),
    "tokens": counter(
        "tokens_total",
        "Prompt tokens of requests with marks or options: prefix + reused + computed; recomputed is in reused.",
        "kind",
    ),
    "fallbacks": counter(
        "fallbacks_total",
        "Requests that reused no chunk, or by another method than they asked for; off and exact_mode are asked for.",
        "reason",
    ),
    "not_remembered": counter("not_remembered_total", "Computed chunks that could not be kept, by reason.", "reason"),
    "not_packed": counter(
        "not_packed_total",
        "Prompts of which decoding was to keep a part (keep_tokens) and kept all, by reason.",
        "reason",
    ),
    "maintenance": counter(
        "maintenance_total",
        "Variants that were promoted to a node of their own, prepared, or computed exactly while idle (refreshed).",
        "kind",
    ),
    "events": counter(
        "events_total",
        "Events that were published, by kind; of those that were dropped, since the queue was full, in all.",
        "kind",
    ),
    "fused_batches": counter(
        "fused_batches_total",
        "Forwards of batches with reused chunks, by the kernels that served them; one may have two.",
        "kernel",
    ),
}


class ChunkMetrics(Meters):
    """Numbers of one scheduler process; reasons are those of `chunk_cache.types`."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(_METERS, enabled=enabled)

    def count_plan(self, plan: RecomputePlan) -> None:
        """Counts the chunks and tokens of an admitted request."""
        for chunk in plan.chunks:
            self.add("chunks", chunk.status, chunk.reason or "none")
        self.add("tokens", "prefix", num=plan.prefix_len)
        self.add("tokens", "reused", num=plan.num_reused)
        self.add("tokens", "computed", num=plan.num_computed)
        self.add("tokens", "recomputed", num=plan.num_recomputed)
        if plan.fallback_reason is not None:
            self.add("fallbacks", plan.fallback_reason)
