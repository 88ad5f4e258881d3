"""Bounds of one step, as SGLang's own flags set them; in any of its processes.

Verbs: `step_len` (rows of a step), `most_unknown_rows` (rows of a step in which the forward chooses rows).
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_schedule


def step_len() -> int | None:
    """Rows that a step computes at most (`--chunked-prefill-size`); None = a prompt is computed in one step."""
    size = get_schedule().chunked_prefill_size
    return size if size is not None and size > 0 else None


def most_unknown_rows() -> int | None:
    """Most rows of a step in which only the forward finds which of them are needed; None = any number.

    Such rows cannot be cut into steps, so their activations are in memory together: as many as `--max-prefill-tokens`
    allows in one batch of stock SGLang.
    """
    size = step_len()
    return None if size is None else max(size, get_schedule().max_prefill_tokens)
