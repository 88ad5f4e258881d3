"""Meters: measured where metrics are enabled, under the names and labels of their table; nowhere else."""

from __future__ import annotations

import prometheus_client
import pytest

from sglang_chunk_cache.telemetry.meters import Meters, counter, gauge, histogram

TABLE = {
    "calls": counter("test_calls_total", "Calls.", "kind"),
    "room": gauge("test_room", "Room."),
    "time": histogram("test_time", "Time.", "kind", buckets=(1.0, 2.0)),
}


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"sglang:chunk_cache_test_{name}", labels)


@pytest.mark.parametrize("enabled", [False, True])
def test_what_is_measured(enabled: bool) -> None:
    meters = Meters(TABLE, enabled=enabled)
    meters.add("calls", "a")
    meters.add("calls", "a", num=2.5)
    meters.set("room", 7)
    meters.observe("time", 1.5, "b")
    found = (value("calls_total", kind="a"), value("room"), value("time_bucket", kind="b", le="2.0"))
    assert found == ((3.5, 7.0, 1.0) if enabled else (None, None, None))
