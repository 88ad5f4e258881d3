"""What the selector answers, as Prometheus metrics of the process that asks it."""

from __future__ import annotations

from sglang_chunk_cache.telemetry.meters import counter

SELECTOR_METERS = {
    "answers": counter(
        "selector_answers_total",
        "Prompts that were shown to the selector, by reason; none where it gave scores.",
        "reason",
    ),
    "seconds": counter("selector_seconds_total", "Seconds from such a question to its answer."),
    "restarts": counter("selector_restarts_total", "Times that the selector's process was started again."),
}
