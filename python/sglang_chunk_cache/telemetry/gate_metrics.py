"""GateMetrics: Prometheus histograms and counters of the gate.

Promises: as for `ChunkMetrics`; a partition is `default` or a digest, and there are few of them.
"""

from __future__ import annotations

from typing import Any

from chunk_cache.gate.verification_ledger import MEASURES, Kind, Measure


class GateMetrics:
    """Numbers of one scheduler process.

    Args:
        model: name under which the model is served.
    """

    def __init__(self, *, enabled: bool, model: str) -> None:
        self._is_enabled = enabled
        self._model = model
        if not enabled:
            return
        # Imported here: the client reads its multi-process folder, which SGLang sets, when it is first imported.
        from prometheus_client import Counter, Gauge, Histogram

        prefix = "sglang:chunk_cache"
        texts = {
            "kl": "KL of the first token, exact to fused, of verified replies, in nats.",
            "agreement": "Share of the tokens of verified replies that an exact prefill finds likeliest.",
            "nats_lost": "Log-probability that verified replies lost, in nats a token.",
        }
        labels = ["model_name", "method", "partition", "ratios"]
        self._measures: dict[str, Any] = {
            name: Histogram(f"{prefix}_verified_{name}", texts[name], labels, buckets=edges)
            for name, edges in MEASURES.items()
        }
        self._verifications = Counter(
            f"{prefix}_verifications_total",
            "Fused replies that were chosen, by what became of each.",
            ["outcome"],
        )
        self._drifts = Counter(f"{prefix}_drifts_total", "Times that KL of a kind of reply changed.", labels)
        self._moves = Counter(f"{prefix}_target_moves_total", "Times that the target moved a partition.", ["partition"])
        self._step = Gauge(
            f"{prefix}_target_step",
            "Step that a partition is served at, from 0; that behind the last is exact prefill.",
            ["partition"],
            multiprocess_mode="mostrecent",
        )

    def observe(self, kind: Kind, measure: Measure) -> None:
        """One verified reply."""
        if not self._is_enabled:
            return
        for name, histogram in self._measures.items():
            value = getattr(measure, name)
            if value is not None:
                histogram.labels(self._model, kind.method, kind.partition, kind.band).observe(value)

    def count_verification(self, outcome: str, num: int = 1) -> None:
        """One that was `verified`, `given_up` for now, or dropped for a reason of `gate.verification_queue`."""
        if self._is_enabled:
            self._verifications.labels(outcome).inc(num)

    def count_drift(self, kind: Kind) -> None:
        """KL of a kind has drifted."""
        if self._is_enabled:
            self._drifts.labels(self._model, kind.method, kind.partition, kind.band).inc()

    def count_move(self, partition: str) -> None:
        """A partition moved."""
        if self._is_enabled:
            self._moves.labels(partition).inc()

    def set_step(self, partition: str, step: int) -> None:
        """Where a partition stands."""
        if self._is_enabled:
            self._step.labels(partition).set(step)
