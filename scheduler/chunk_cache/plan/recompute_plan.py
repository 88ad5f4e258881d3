"""The recompute plan: what happens to every token of one prompt. A frozen value: print it, compare it, test it.

The token ranges of a prompt, drawn once (#: in the exact cache, =: brought in from chunks, R: brought in and selected
to be recomputed, .: computed because nothing is stored, >: computed behind the load):

    0            prefix_len = load_start                     load_end                 prompt_len
    |############|RR=======....RRRR=============....RR=======|>>>>>>>>>>>>>>>>>>>>>>>>|
                    chunk        chunk                chunk    rest of it, question

The load is [load_start, load_end), whole pages. Inside it the rows of the forward are `row_positions` (R and .), behind
it every position. So computed_tokens = (.) + (>), reused_tokens = (R) + (=), recomputed_tokens = (R).

If R is found during the forward (`selection`), `row_positions` are the rows that it begins with: the whole load if all
rows are scored at a layer; only (.) if the question finds `num_late_rows` more in the stored KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from chunk_cache.methods import Rows, Stage
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.image_spans import num_within
from chunk_cache.plan.selection_plan import Selection
from chunk_cache.types import Span, Status

Reply: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class RecomputePlan:
    """What happens to every token of one prompt; see the picture at the top of this file."""

    prompt_len: int
    prefix_len: int
    """Exact prefix, whole pages."""
    load_start: int
    load_end: int
    """The load is ``[load_start, load_end)``, whole pages; empty = no load, and then both are `prefix_len`."""
    chunks: tuple[ChunkPlan, ...]
    method: str
    ratio: float
    """The effective ratio."""
    row_positions: Rows
    """Prompt positions in the load that are computed, sorted, read-only; int64 [num_rows]."""
    num_recomputed: int
    """Reused tokens that are computed again; where rows leave gradually, their mean over the layers, rounded up."""
    num_reused: int
    fallback_reason: str | None = None
    selection: Selection | None = None
    """What the forward itself must choose or drop; None = nothing, `row_positions` are final."""
    num_late_rows: int = 0
    """Rows in the load that the forward adds once the question has found them."""
    images: tuple[Span, ...] = ()
    """Images of the prompt, ascending."""
    is_shifted: bool = True
    """Whether the keys of reused tokens are turned to their new positions."""

    @property
    def num_load_rows(self) -> int:
        """Rows in the load that one layer computes at most."""
        return len(self.row_positions) + self.num_late_rows

    @property
    def load_len(self) -> int:
        return self.load_end - self.load_start

    @property
    def num_computed(self) -> int:
        """Tokens that are neither in the exact prefix nor brought in."""
        return self.prompt_len - self.prefix_len - self.num_reused

    @property
    def num_asking(self) -> int:
        """Rows that run twice, first in a forward of the question over the reused KV."""
        return self.num_computed if self.num_late_rows else 0

    @property
    def num_saved(self) -> int:
        """Rows that the prefill need not compute because of reuse."""
        return max(0, self.num_reused - self.num_recomputed - self.num_asking)

    @property
    def num_rows(self) -> int:
        """Rows of the whole prefill, at the layer that computes most: what it must have room for."""
        return self.num_load_rows + self.prompt_len - self.load_end

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tokens, by the names that they have in the reply."""
        return {
            "prefix_tokens": self.prefix_len,
            "reused_tokens": self.num_reused,
            "computed_tokens": self.num_computed,
            "recomputed_tokens": self.num_recomputed,
        }

    def reply(self, *, explain: bool = False) -> Reply:
        """The reply object of the contract, of plain JSON values.

        ``prefix_tokens + reused_tokens + computed_tokens`` is the prompt's length.

        Args:
            explain: add the plan as text, and per chunk what was brought in.
        """
        reply: Reply = {
            **self.counts,
            **({"reused_image_tokens": sum(map(self.num_image_tokens, self.chunks))} if self.images else {}),
            "method": self.method,
            "ratio": self.ratio,
            "fallback_reason": self.fallback_reason,
            "chunks": [self._reply_chunk(chunk, explain) for chunk in self.chunks],
        }
        if explain:
            reply["explain"] = str(self)
        return reply

    def _reply_chunk(self, chunk: ChunkPlan, explain: bool) -> Reply:
        reply: Reply = {
            "start": chunk.start,
            "end": chunk.end,
            "status": chunk.status.value,
            "reason": chunk.reason,
        }
        if chunk.num_reused:
            reply |= {"variant": chunk.shown_variant, "cfo": chunk.cfo}
            if chunk.other_system is not None:
                reply["other_system"] = chunk.other_system
            reply["kind"] = chunk.kind
        if num_within(chunk.start, chunk.end, self.images):
            reply["reused_image_tokens"] = self.num_image_tokens(chunk)
        if chunk.ranked_by is not None:
            reply["ranked_by"] = chunk.ranked_by
        if explain:
            reply |= {
                "generation": chunk.generation,
                "reused_tokens": chunk.num_reused,
                "shift": chunk.shift,
                "recomputed_positions": self.recomputed_in(chunk).tolist(),
            }
        return reply

    def num_image_tokens(self, chunk: ChunkPlan) -> int:
        """Tokens of images that the chunk brings in."""
        return num_within(chunk.dst_start, chunk.dst_end, self.images)

    def recomputed_in(self, chunk: ChunkPlan) -> Rows:
        """Positions of the chunk to recompute, as known before the forward; none if the forward itself chooses."""
        if self.selection is not None and self.selection.stage is not Stage.BEFORE:
            return self.row_positions[:0]
        first, last = np.searchsorted(self.row_positions, (chunk.dst_start, chunk.dst_end))
        return self.row_positions[first:last]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecomputePlan):
            return NotImplemented
        return self._scalars() == other._scalars() and np.array_equal(self.row_positions, other.row_positions)

    __hash__ = None  # type: ignore[assignment]  # it holds an array

    def _scalars(self) -> tuple[object, ...]:
        return (
            *(self.prompt_len, self.prefix_len, self.load_start, self.load_end, self.chunks, self.method, self.ratio),
            *(self.num_recomputed, self.num_reused, self.fallback_reason, self.selection, self.num_late_rows),
            self.is_shifted,
        )

    def __str__(self) -> str:
        """A short table, to read when an answer is wrong."""
        lines = [
            f"prompt {self.prompt_len} = prefix {self.prefix_len} + reused {self.num_reused} + "
            f"computed {self.num_computed}; load [{self.load_start}, {self.load_end})",
            f"rows {self.num_rows}; recomputed {self.num_recomputed}, computed {self.num_computed}; "
            f"method {self.method}, ratio {self.ratio:g}, fallback {self.fallback_reason or '-'}",
        ]
        if self.chunks:
            lines.append(
                "   start      end  status   reason                   variant"
                "  gen    CFO  source offset  brought in    shift"
            )
        for c in self.chunks:
            line = f"{c.start:>8} {c.end:>8}  {c.status.value:<8} {c.reason or '-':<16}"
            if c.status is Status.HIT:
                cfo = "-" if c.cfo is None else f"{c.cfo:.3f}"
                line += f" {c.shown_variant!s:>15} {c.generation!s:>4} {cfo:>6}"
                line += f" {c.src_offset:>14} {c.num_reused:>11} {c.shift:>+8}"
            lines.append(line)
        return "\n".join(line.rstrip() for line in lines)


def lead_end(chunks: Sequence[ChunkPlan]) -> int:
    """Where the text in front of the first chunk that is brought in ends."""
    return min(chunk.dst_start for chunk in chunks if chunk.num_reused)
