"""The words every other file shares: a span, what became of a chunk, and why.

`Status` and `REASONS` are the only values that may appear in a reply or as a metric label.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""Half-open range ``[start, end)`` of token positions in a prompt."""

MAX_ID_LEN = 80
"""Characters that are kept, and shown, of what a client calls a request or a chunk."""


class Status(StrEnum):
    """What became of one marked chunk; if it begins inside the exact prefix, its part behind the prefix decides."""

    PREFIX = "prefix"
    """Wholly inside the exact prefix."""
    HIT = "hit"
    """Brought in, at least in part, from a stored variant."""
    MISS = "miss"
    """Not stored in a form that this prompt may use: computed and, unless the mode is off, remembered."""
    SKIPPED = "skipped"
    """Stored but not used, or not looked up; the reason says why."""


REASONS: Mapping[str, str] = MappingProxyType(
    {
        "off": "The request asked for mode off: nothing is looked up and nothing is remembered.",
        "exact_mode": "The request asked for mode exact: the chunk is stored but approximate reuse was not wanted.",
        "not_stored": "No variant of the chunk has been computed in this partition.",
        "evicted": "The chunk was known, but its key-value cache has left the store.",
        "weights_changed": "What was stored of the chunk was computed with weights that the model has no more.",
        "partition_share": "The chunk was evicted, or not kept, because its partition holds its share of the server.",
        "too_short": "The chunk would bring in fewer tokens than the least worth reusing, after rounding to pages.",
        "cut": "The model keeps states, which are known behind whole chunks only, and a part of it was to be used.",
        "states": "What the chunk does to the states of the model is not stored, or has no room (state_bytes).",
        "high_cfo": "So much of the chunk would be recomputed that it is computed instead (max_cfo of the server).",
        "untrusted": "The chunk is stored behind other requests' passages only, and the server trusts what was warmed.",
        "preparing": "The request asked for mode prepare or warm: its last chunk is computed, and kept for any prompt.",
        "target": "The target of the server could not be met with reuse, so the request was computed exactly.",
        "logprobs": "Input log-probabilities were asked for, so these positions must be computed.",
        "memory": "There was no room for the slots of the load, or of the packed prompt (keep_tokens).",
        "tier_slow": "The chunk is stored below the KV pool, but computing it was estimated to be faster.",
        "tier_late": "The chunk was waited for twice as long as loading or computing it was estimated to take.",
        "tier_timeout": "Loading the chunk from below the KV pool took too long.",
        "tier_corrupt": "What is stored of the chunk below the KV pool is damaged; it is not used.",
        "tier_mismatch": "What is stored of the chunk below the KV pool belongs to other tokens or another model.",
        "tier_missing": "The chunk was deleted from below the KV pool while it was being loaded.",
        "tier_unavailable": "The store below the KV pool could not be reached.",
        "tier_unreadable": "The store below the KV pool could not be read.",
        "tier_full": "The store below the KV pool, or the memory of the host, had no room.",
        "tier_ranks": "Not all tensor-parallel ranks found the same variant below the KV pool.",
        "unsupported": "The request uses a feature that chunk reuse does not support.",
        "selector_timeout": "The selector did not answer in time; near chose.",
        "selector_unavailable": "The selector's process has ended and is being started again; near chose.",
        "selector_failed": "The selector could not score this prompt, the log says why; near chose.",
        "selector_too_long": "A chunk and its question are longer than the selector's model can read; near chose.",
        "too_many_rows": "The method begins with more rows than a step may have (--max-prefill-tokens); near chose.",
        "question_in_parts": "What follows the reused chunks takes several steps, so that the question, by which the "
        "method chooses, comes too late (--chunked-prefill-size); near chose.",
        "images": "The prompt has images, beside which a method chooses before the forward only; near chose.",
        "short_answer": "The answer ended before decoding over a part of the prompt (keep_tokens) began.",
        "other_system": "The chunk is stored behind another system prompt or other text between chunks only.",
        "generation_limit": "Only variants derived from too many approximate ones are stored.",
        "prompt_end": "The chunk lies behind the last reusable position of the prompt.",
    }
)
"""Reason -> one sentence for the docs."""
