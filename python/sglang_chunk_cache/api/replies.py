"""Replies: what the scheduler said of the choices of one HTTP request, and summaries of it.

Verbs: `note` (an output of a choice), `merged` (the object of the OpenAI and Anthropic replies), `header`, `usage`.
This is the one place that adds choices up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.prompt.chunk_cache_fields import KEY

USAGE_KEYS = ("chunk_reused_tokens", "chunk_recomputed_tokens")


@dataclass
class Replies:
    """The last known `meta_info` of each choice, by its index."""

    _meta: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Sequence[Mapping[str, Any]]) -> Replies:
        """The replies in the outputs of a whole response."""
        return cls({index: output["meta_info"] for index, output in enumerate(outputs)})

    def note(self, index: int, meta_info: Mapping[str, Any]) -> None:
        """Notes one output; a choice without marks keeps its place."""
        self._meta[index] = meta_info

    def merged(self) -> Any:
        """One object for one choice, a list by choice index for several; None where no choice has one."""
        known = [self._meta[index].get(KEY) for index in sorted(self._meta)]
        if all(reply is None for reply in known):
            return None
        return known[0] if len(known) == 1 else known

    def header(self) -> str:
        """The sums over all choices, for the header of a response; empty where nothing is known."""
        known = self._known(self._meta)
        reused, recomputed = _sum(known, "reused_tokens"), _sum(known, "recomputed_tokens")
        return f"reused={reused}, recomputed={recomputed}" if known else ""

    def usage(self, num_choices: int) -> dict[str, int]:
        """Details of the prompt tokens in `usage`, which counts each prompt once; empty where nothing is known.

        Args:
            num_choices: of each prompt.
        """
        known = self._known(index for index in self._meta if index % num_choices == 0)
        if not known:
            return {}
        counts = (_sum(known, "reused_tokens"), _sum(known, "recomputed_tokens"))
        return dict(zip(USAGE_KEYS, counts, strict=True))

    def _known(self, indices: Iterable[int]) -> list[Mapping[str, Any]]:
        return [reply for index in indices if (reply := self._meta[index].get(KEY)) is not None]


def _sum(replies: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(reply[name] for reply in replies)
