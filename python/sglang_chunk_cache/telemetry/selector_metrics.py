"""SelectorMetrics: Prometheus counters of the selector, in the process that asks it.

Verbs: `count_answer` (a prompt has its scores, or a reason), `count_restart` (its process was started again).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter


class SelectorMetrics:
    """Counters; without `enabled` nothing is counted."""

    def __init__(self, *, enabled: bool) -> None:
        self._counters: dict[str, Counter] = {}
        if not enabled:
            return
        # Imported here: the client reads its multi-process folder, which SGLang sets, when it is first imported.
        from prometheus_client import Counter

        self._counters = {
            "answers": Counter(
                "sglang:chunk_cache_selector_answers_total",
                "Prompts that were shown to the selector, by reason; none where it gave scores.",
                ["reason"],
            ),
            "seconds": Counter(
                "sglang:chunk_cache_selector_seconds_total", "Seconds from such a question to its answer."
            ),
            "restarts": Counter(
                "sglang:chunk_cache_selector_restarts_total", "Times that the selector's process was started again."
            ),
        }

    def count_answer(self, reason: str | None, seconds: float) -> None:
        """Counts one prompt."""
        if self._counters:
            self._counters["answers"].labels(reason or "none").inc()
            self._counters["seconds"].inc(seconds)

    def count_restart(self) -> None:
        """Counts one start of the process but the first."""
        if self._counters:
            self._counters["restarts"].inc()
