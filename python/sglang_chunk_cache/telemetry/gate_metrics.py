"""GateMetrics: what the gate finds, as Prometheus metrics; a partition is `default` or a digest, and there are few."""

from __future__ import annotations

from chunk_cache.gate.verification_ledger import MEASURES, Kind, Measure
from sglang_chunk_cache.telemetry.meters import Meters, counter, gauge, histogram

_TEXTS = {
    "kl": "KL of the first token, exact to fused, of verified replies, in nats.",
    "agreement": "Share of the tokens of verified replies that an exact prefill finds likeliest.",
    "nats_lost": "Log-probability that verified replies lost, in nats a token.",
}
_KIND = ("model_name", "method", "partition", "ratios")
_METERS = {
    **{name: histogram(f"verified_{name}", _TEXTS[name], *_KIND, buckets=edges) for name, edges in MEASURES.items()},
    "verifications": counter(
        "verifications_total", "Fused replies that were chosen, by what became of each.", "outcome"
    ),
    "drifts": counter("drifts_total", "Times that KL of a kind of reply changed.", *_KIND),
    "moves": counter("target_moves_total", "Times that the target moved a partition.", "partition"),
    "step": gauge(
        "target_step", "Step that a partition is served at, from 0; that behind the last is exact prefill.", "partition"
    ),
}


class GateMetrics(Meters):
    """Numbers of one scheduler process.

    Args:
        model: name under which the model is served.
    """

    def __init__(self, *, enabled: bool, model: str) -> None:
        super().__init__(_METERS, enabled=enabled)
        self._model = model

    def observe_reply(self, kind: Kind, measure: Measure) -> None:
        """Adds one verified reply."""
        for name in MEASURES:
            value = getattr(measure, name)
            if value is not None:
                self.observe(name, value, *self._labels_of(kind))

    def count_drift(self, kind: Kind) -> None:
        """Counts that the KL of a kind has drifted."""
        self.add("drifts", *self._labels_of(kind))

    def _labels_of(self, kind: Kind) -> tuple[str, ...]:
        return self._model, kind.method, kind.partition, kind.band
