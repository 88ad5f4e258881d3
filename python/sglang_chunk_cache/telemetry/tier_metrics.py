"""TierMetrics: what goes to and comes from the tiers below the KV pool, as Prometheus metrics."""

from __future__ import annotations

from sglang_chunk_cache.telemetry.meters import Meters, counter, gauge

_METERS = {
    "loads": counter("tier_loads_total", "Chunks that waiting requests asked for, by outcome.", "tier", "outcome"),
    "load_bytes": counter("tier_load_bytes_total", "Bytes read from a tier.", "tier"),
    "load_seconds": counter("tier_load_seconds_total", "Seconds spent reading from a tier, by its workers.", "tier"),
    "writes": counter("tier_writes_total", "Chunks to be written to a tier, by outcome.", "tier", "outcome"),
    "write_bytes": counter("tier_write_bytes_total", "Bytes written to a tier.", "tier"),
    "write_seconds": counter("tier_write_seconds_total", "Seconds spent writing to a tier, by its workers.", "tier"),
    "estimated_seconds": counter("tier_estimated_seconds_total", "What loads were estimated to take.", "tier"),
    "actual_seconds": counter("tier_actual_seconds_total", "What the loads that were estimated took.", "tier"),
    "evictions": counter("tier_evictions_total", "Chunks that a tier evicted.", "tier"),
    "entries": gauge("tier_entries", "Chunks in a tier.", "tier"),
    "bytes": gauge("tier_bytes", "Bytes in a tier.", "tier"),
}


class TierMetrics(Meters):
    """Numbers of one scheduler process."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(_METERS, enabled=enabled)

    def count_load(self, tier: str, outcome: str, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """Counts a chunk to load; outcome: `ok`, `not_stored`, or a reason of `TierError` or of the replies."""
        self.add("loads", tier, outcome)
        self.add("load_bytes", tier, num=num_bytes)
        self.add("load_seconds", tier, num=seconds)

    def count_estimate(self, tier: str, estimated_s: float, actual_s: float) -> None:
        """Adds one load whose time had been estimated."""
        self.add("estimated_seconds", tier, num=estimated_s)
        self.add("actual_seconds", tier, num=actual_s)

    def count_write(self, tier: str, outcome: str, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """Counts a chunk to write; outcome: `ok`, `busy`, `refused` by the budget, or a reason of `TierError`."""
        self.add("writes", tier, outcome)
        self.add("write_bytes", tier, num=num_bytes)
        self.add("write_seconds", tier, num=seconds)

    def set_size(self, tier: str, num_entries: int, num_bytes: int) -> None:
        self.set("entries", num_entries, tier)
        self.set("bytes", num_bytes, tier)
