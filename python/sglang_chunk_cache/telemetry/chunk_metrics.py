"""ChunkMetrics: what the chunk cache does with requests, as Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_chunk_cache.telemetry.meters import Meters, counter, histogram

if TYPE_CHECKING:
    from chunk_cache.plan.recompute_plan import RecomputePlan


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
    "chunks": counter("chunks_total", "Marked chunks of admitted requests, by status and reason.", "status", "reason"),
    "tokens": counter(
        "tokens_total",
        "Prompt tokens of requests with marks or options: prefix + reused + computed; recomputed is in reused.",
        "kind",
    ),
    "fallbacks": counter(
        "fallbacks_total",
        "Requests that were served without reuse although chunks were stored, by reason.",
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
            self.count_fallback(plan.fallback_reason)

    def count_fallback(self, reason: str) -> None:
        """Counts one request whose plan reuses nothing, or failed after its admission."""
        self.add("fallbacks", reason)

    def count_not_remembered(self, reason: str) -> None:
        """Counts one chunk that was computed and lost."""
        self.add("not_remembered", reason)

    def count_not_packed(self, reason: str) -> None:
        """Counts one prompt that stayed whole."""
        self.add("not_packed", reason)

    def count_maintenance(self, kind: str) -> None:
        """Counts one variant that was ``promoted``, ``prepared`` or ``refreshed``."""
        self.add("maintenance", kind)

    def count_events(self, kind: str, num: int) -> None:
        """Counts events of one of `event_log.KINDS` that were published, or that were ``dropped``."""
        self.add("events", kind, num=num)

    def observe_stage(self, name: str, seconds: float) -> None:
        """One of `STAGES` took so long."""
        self.observe(name, seconds)

    def observe_saved(self, seconds: float) -> None:
        """What reuse spared one request."""
        self.observe("saved", seconds)

    def count_fused_batch(self, kernel: str) -> None:
        """Counts one forward that was served by these kernels, ``torch``, ``triton`` or ``flashinfer``."""
        self.add("fused_batches", kernel)
