"""TierMetrics: Prometheus counters and gauges of the tiers below the KV pool.

Promises: as for `ChunkMetrics`: labels are names of tiers and outcomes from fixed lists, and only rank 0 counts.
"""

from __future__ import annotations

from typing import Any


class TierMetrics:
    """Counters of one scheduler process."""

    def __init__(self, *, enabled: bool) -> None:
        self._is_enabled = enabled
        if not enabled:
            return
        # Imported here: the client reads its multi-process folder, which SGLang sets, when it is first imported.
        from prometheus_client import Counter, Gauge

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(f"sglang:chunk_cache_tier_{name}", what, ["tier", *labels])

        def gauge(name: str, what: str) -> Any:
            return Gauge(f"sglang:chunk_cache_tier_{name}", what, ["tier"], multiprocess_mode="mostrecent")

        self._loads = counter("loads_total", "Chunks that waiting requests asked for, by outcome.", "outcome")
        self._load_bytes = counter("load_bytes_total", "Bytes read from a tier.")
        self._load_seconds = counter("load_seconds_total", "Seconds spent reading from a tier, by its workers.")
        self._writes = counter("writes_total", "Chunks to be written to a tier, by outcome.", "outcome")
        self._write_bytes = counter("write_bytes_total", "Bytes written to a tier.")
        self._write_seconds = counter("write_seconds_total", "Seconds spent writing to a tier, by its workers.")
        self._estimated_seconds = counter("estimated_seconds_total", "What loads were estimated to take.")
        self._actual_seconds = counter("actual_seconds_total", "What the loads that were estimated took.")
        self._evictions = counter("evictions_total", "Chunks that a tier evicted.")
        self._entries = gauge("entries", "Chunks in a tier.")
        self._bytes = gauge("bytes", "Bytes in a tier.")

    def count_load(self, tier: str, outcome: str, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """One chunk: `ok`, `not_stored`, or one of the reasons of `TierError` or of the replies."""
        if not self._is_enabled:
            return
        self._loads.labels(tier, outcome).inc()
        self._load_bytes.labels(tier).inc(num_bytes)
        self._load_seconds.labels(tier).inc(seconds)

    def count_estimate(self, tier: str, estimated_s: float, actual_s: float) -> None:
        """One load whose time had been estimated."""
        if self._is_enabled:
            self._estimated_seconds.labels(tier).inc(estimated_s)
            self._actual_seconds.labels(tier).inc(actual_s)

    def count_write(self, tier: str, outcome: str, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """One chunk: `ok`, `busy`, `refused` by the budget, or a reason of `TierError`."""
        if not self._is_enabled:
            return
        self._writes.labels(tier, outcome).inc()
        self._write_bytes.labels(tier).inc(num_bytes)
        self._write_seconds.labels(tier).inc(seconds)

    def count_eviction(self, tier: str) -> None:
        if self._is_enabled:
            self._evictions.labels(tier).inc()

    def set_size(self, tier: str, num_entries: int, num_bytes: int) -> None:
        if self._is_enabled:
            self._entries.labels(tier).set(num_entries)
            self._bytes.labels(tier).set(num_bytes)
