"""ChunkMetrics: Prometheus counters and histograms of the chunk cache, next to SGLang's own on `/metrics`.

Verbs: `count_plan` (a request was admitted), `count_not_remembered` (a chunk was computed and could not be kept),
`count_not_packed` (a prompt stayed whole), `count_maintenance` (a variant was promoted or refreshed),
`count_fused_batch` (a forward brought chunks in), `count_events` (they were published or dropped), `observe_stage` (of
serving a request), `observe_saved` (a request has ended).

Promises: the labels are the statuses and the fixed reasons of `chunk_cache.types`, never a client's text. Only rank 0
counts, so that tensor parallelism does not multiply the numbers. Without `--enable-metrics` nothing is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

    from chunk_cache.plan.recompute_plan import RecomputePlan


STAGES = {
    "planning": "Seconds in which it was decided what happens to every token of a request.",
    "loading": "Seconds that requests were held in the queue until their chunks, or the selector's scores, were there.",
    "assembling": "Seconds of the host in which KV of chunks was copied to its new place, per batch.",
}
_SECONDS = [m * 10**e for e in range(-5, 2) for m in (1, 2, 5)]


class ChunkMetrics:
    """Numbers of one scheduler process."""

    def __init__(self, *, enabled: bool) -> None:
        self._counters: dict[str, Counter] = {}
        self._seconds: dict[str, Histogram] = {}
        if not enabled:
            return
        # Imported here: the client reads its multi-process folder, which SGLang sets, when it is first imported.
        from prometheus_client import Counter, Histogram

        seconds = {**STAGES, "saved": "Seconds of prefill that reuse was estimated to spare a request with marks."}
        self._seconds = {
            name: Histogram(f"sglang:chunk_cache_{name}_seconds", text, buckets=_SECONDS)
            for name, text in seconds.items()
        }
        self._counters = {
            "chunks": Counter(
                "sglang:chunk_cache_chunks_total",
                "Marked chunks of admitted requests, by status and reason.",
                ["status", "reason"],
            ),
            "tokens": Counter(
                "sglang:chunk_cache_tokens_total",
                "Prompt tokens of requests with marks or options: prefix + reused + computed; recomputed is in reused.",
                ["kind"],
            ),
            "fallbacks": Counter(
                "sglang:chunk_cache_fallbacks_total",
                "Requests that were served without reuse although chunks were stored, by reason.",
                ["reason"],
            ),
            "not_remembered": Counter(
                "sglang:chunk_cache_not_remembered_total",
                "Computed chunks that could not be kept, by reason.",
                ["reason"],
            ),
            "not_packed": Counter(
                "sglang:chunk_cache_not_packed_total",
                "Prompts of which decoding was to keep a part (keep_tokens) and kept all, by reason.",
                ["reason"],
            ),
            "maintenance": Counter(
                "sglang:chunk_cache_maintenance_total",
                "Variants that were promoted to a node of their own, or computed exactly while idle (refreshed).",
                ["kind"],
            ),
            "events": Counter(
                "sglang:chunk_cache_events_total",
                "Events that were published, by kind; of those that were dropped, since the queue was full, in all.",
                ["kind"],
            ),
            "fused_batches": Counter(
                "sglang:chunk_cache_fused_batches_total",
                "Forwards of batches with reused chunks, by the kernels that served them; one may have two.",
                ["kernel"],
            ),
        }

    def count_plan(self, plan: RecomputePlan) -> None:
        """Counts the chunks and tokens of an admitted request."""
        if not self._counters:
            return
        for chunk in plan.chunks:
            self._counters["chunks"].labels(chunk.status, chunk.reason or "none").inc()
        tokens = self._counters["tokens"]
        tokens.labels("prefix").inc(plan.prefix_len)
        tokens.labels("reused").inc(plan.num_reused)
        tokens.labels("computed").inc(plan.num_computed)
        tokens.labels("recomputed").inc(plan.num_recomputed)
        if plan.fallback_reason is not None:
            self._counters["fallbacks"].labels(plan.fallback_reason).inc()

    def count_fallback(self, reason: str) -> None:
        """Counts one request whose plan failed after its admission."""
        if self._counters:
            self._counters["fallbacks"].labels(reason).inc()

    def count_not_remembered(self, reason: str) -> None:
        """Counts one chunk that was computed and lost."""
        if self._counters:
            self._counters["not_remembered"].labels(reason).inc()

    def count_not_packed(self, reason: str) -> None:
        """Counts one prompt that stayed whole."""
        if self._counters:
            self._counters["not_packed"].labels(reason).inc()

    def count_maintenance(self, kind: str) -> None:
        """Counts one variant that was ``promoted`` or ``refreshed``."""
        if self._counters:
            self._counters["maintenance"].labels(kind).inc()

    def count_events(self, kind: str, num: int) -> None:
        """Counts events of one of `event_log.KINDS` that were published, or that were ``dropped``."""
        if self._counters:
            self._counters["events"].labels(kind).inc(num)

    def observe_stage(self, name: str, seconds: float) -> None:
        """One of `STAGES` took so long."""
        if self._seconds:
            self._seconds[name].observe(seconds)

    def observe_saved(self, seconds: float) -> None:
        """What reuse spared one request."""
        if self._seconds:
            self._seconds["saved"].observe(seconds)

    def count_fused_batch(self, kernel: str) -> None:
        """Counts one forward that was served by these kernels, ``torch``, ``triton`` or ``flashinfer``."""
        if self._counters:
            self._counters["fused_batches"].labels(kernel).inc()
