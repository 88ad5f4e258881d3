"""Meters: Prometheus counters, gauges and histograms, next to SGLang's own on `/metrics`, made from a table.

Promises: labels are from fixed lists, never a client's text. Only rank 0 measures, so that tensor parallelism does not
multiply the numbers. Without `--enable-metrics` nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "sglang:chunk_cache_"


@dataclass(frozen=True)
class Meter:
    """One metric.

    Attributes:
        kind: class of the Prometheus client.
        name: behind `PREFIX`.
        text: what it measures, for people.
        options: further arguments of the class.
    """

    kind: str
    name: str
    text: str
    labels: tuple[str, ...]
    options: Mapping[str, Any]


def counter(name: str, text: str, *labels: str) -> Meter:
    return Meter("Counter", name, text, labels, {})


def gauge(name: str, text: str, *labels: str) -> Meter:
    return Meter("Gauge", name, text, labels, {"multiprocess_mode": "mostrecent"})


def histogram(name: str, text: str, *labels: str, buckets: Sequence[float]) -> Meter:
    return Meter("Histogram", name, text, labels, {"buckets": buckets})


class Meters:
    """The metrics of one part of a process, each under the name that it is measured by."""

    def __init__(self, meters: Mapping[str, Meter], *, enabled: bool) -> None:
        self._meters: dict[str, Any] = dict.fromkeys(meters)  # None: not measured
        if enabled:
            # Imported here: the client reads its multi-process folder, which SGLang sets, when it is first imported.
            import prometheus_client

            for name, meter in meters.items():
                kind = getattr(prometheus_client, meter.kind)
                self._meters[name] = kind(f"{PREFIX}{meter.name}", meter.text, meter.labels, **meter.options)

    def add(self, name: str, *labels: str, num: float = 1) -> None:
        """Adds to a counter."""
        if (meter := self._labelled(name, labels)) is not None:
            meter.inc(num)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        if (meter := self._labelled(name, labels)) is not None:
            meter.set(value)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds a value to a histogram."""
        if (meter := self._labelled(name, labels)) is not None:
            meter.observe(value)

    def _labelled(self, name: str, labels: tuple[str, ...]) -> Any:
        meter = self._meters[name]
        return meter.labels(*labels) if labels and meter is not None else meter
