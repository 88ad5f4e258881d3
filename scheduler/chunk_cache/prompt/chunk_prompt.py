"""ChunkPrompt: the marked chunks of one prompt, and what its client asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chunk_cache.keys import Partition
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.selector_answer import SelectorAnswer

if TYPE_CHECKING:
    from chunk_cache.index.chunk_index import Lookup
    from chunk_cache.plan.recompute_plan import RecomputePlan


@dataclass(slots=True)
class Memo:
    """What `ChunkManager` found and planned last for a prompt, and at which state of index and store; its own."""

    lookups: dict[int, Lookup] = field(default_factory=dict)
    version: tuple[int, int] = (-1, -1)
    plan: RecomputePlan | None = None
    plan_of: object = None


@dataclass(frozen=True, eq=False, slots=True)
class ChunkPrompt:
    """The marked chunks of one prompt; `dataclasses.replace` gives it the answer of the selector.

    Attributes:
        keys: one per span of the options.
        system: marks of what stands in front of the first of them (`chunk_cache.index.system_prompt`).
        answer: what the selector found, for a method that asks it; None = nothing has come.
        partition: its namespace; chunks of another one are never found.
        unsupported: it uses a feature that reuse does not support, so it is served exactly.
        is_discovered: its chunks were found in a prompt without marks.
        memo: the manager's; not copied.
    """

    options: RequestOptions
    keys: tuple[bytes, ...]
    system: bytes = b""
    answer: SelectorAnswer | None = None
    partition: Partition = field(default_factory=Partition)
    unsupported: bool = False
    is_discovered: bool = False
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    def context(self, chunk: int) -> tuple[bytes, ...]:
        """Keys of the chunks in front of a chunk."""
        return self.keys[:chunk]

    @property
    def to_prepare(self) -> int | None:
        """The chunk that is computed behind the others, its neighbours, and kept as prepared; None = there is none."""
        return len(self.keys) - 1 if self.options.mode == "prepare" and len(self.keys) > 1 else None

    def length(self, chunk: int) -> int:
        """Tokens of a chunk."""
        start, end = self.options.spans[chunk]
        return end - start
