"""SelectorMetrics: what the selector answers, as Prometheus metrics of the process that asks it."""

from __future__ import annotations

from sglang_chunk_cache.telemetry.meters import Meters, counter

_METERS = {
    "answers": counter(
        "selector_answers_total",
        "Prompts that were shown to the selector, by reason; none where it gave scores.",
        "reason",
    ),
    "seconds": counter("selector_seconds_total", "Seconds from such a question to its answer."),
    "restarts": counter("selector_restarts_total", "Times that the selector's process was started again."),
}


class SelectorMetrics(Meters):
    """Counters of one process."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(_METERS, enabled=enabled)

    def count_answer(self, reason: str | None, seconds: float) -> None:
        """Counts one prompt that has its scores, or a reason."""
        self.add("answers", reason or "none")
        self.add("seconds", num=seconds)

    def count_restart(self) -> None:
        """Counts one start of the process but the first."""
        self.add("restarts")
