"""Estimate: what warming a corpus would cost, summed up over the requests that it takes.

Verb: `Estimate.add`. As text it has two lines. A neighbour that several requests name counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def problem_of(failure: dict[str, Any]) -> str:
    """What the server says of a text that it refuses, without the place of the text in the request."""
    return str(failure["error"]).partition(": ")[2]


@dataclass
class Estimate:
    """Chunks that would be computed, by the number of their line.

    Attributes:
        failures: what is wrong with each chunk that cannot be computed.
        exact: tokens of each chunk that is computed behind the filler, or as a neighbour, or alone.
        prepared: tokens of each chunk that is computed behind neighbours, and tokens of these neighbours.
        capacity_tokens: size of the KV pool.
    """

    num_lines: int
    num_already: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    exact: dict[int, int] = field(default_factory=dict)
    prepared: dict[int, tuple[int, int]] = field(default_factory=dict)
    capacity_tokens: int = 0
    _bytes_per_token: float = 0.0

    def add(self, summary: dict[str, Any], numbers: Sequence[int]) -> None:
        """Adds the summary of a dry run.

        Args:
            numbers: line number of each text of the request.
        """
        self.num_already += summary["already"]
        self.failures |= {numbers[one["index"]]: problem_of(one) for one in summary["failed"]}
        self.exact |= {numbers[one["index"]]: one["tokens"] for one in summary["exact"]}
        self.prepared |= {
            numbers[one["index"]]: (one["tokens"], one["neighbour_tokens"]) for one in summary["prepared"]
        }
        self.capacity_tokens = summary["capacity_tokens"]
        if summary["computed_tokens"]:
            self._bytes_per_token = summary["kv_bytes"] / summary["computed_tokens"]

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed and stored."""
        return sum(self.exact.values()) + sum(own for own, _ in self.prepared.values())

    @property
    def numbers(self) -> dict[str, int]:
        """The estimate as numbers by name, for programs."""
        return {
            "lines": self.num_lines,
            "exact": len(self.exact),
            "prepared": len(self.prepared),
            "already": self.num_already,
            "failed": self.num_failed,
            "tokens": self.num_tokens,
            "kv_bytes": round(self.num_tokens * self._bytes_per_token),
            "capacity_tokens": self.capacity_tokens,
        }

    def __str__(self) -> str:
        num_read = sum(read for _, read in self.prepared.values())
        return (
            f"{self.num_lines} lines: {len(self.exact)} chunks to compute, {len(self.prepared)} behind their "
            f"neighbours, {self.num_already} already there, {self.num_failed} failed.\n"
            f"{self.num_tokens} tokens to compute, {num_read} of neighbours to read; "
            f"{self.num_tokens * self._bytes_per_token / 2**20:.1f} MiB of KV; "
            f"the KV pool holds {self.capacity_tokens} tokens."
        )
