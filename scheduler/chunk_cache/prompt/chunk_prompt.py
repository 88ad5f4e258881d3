"""ChunkPrompt: the marked chunks of one prompt, and what its client asked for.

The *pieces* of a prompt are its chunks and the texts between them; those in front of a chunk are its context.
`piece_spans` says where they lie, `nums_before` how many stand in front of each chunk, `piece_keys` names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from chunk_cache.index.system_prompt import marks_of
from chunk_cache.keys import TEXT_LEN, Partition, TokenIds, chunk_keys
from chunk_cache.options.request_options import PREPARING, RequestOptions
from chunk_cache.plan.selector_answer import SelectorAnswer
from chunk_cache.types import Span

if TYPE_CHECKING:
    from chunk_cache.index.lookup import Lookup
    from chunk_cache.methods import Ranking
    from chunk_cache.plan.recompute_plan import RecomputePlan


def piece_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans of all pieces: each chunk, and the text from its end to the next chunk, if there is any."""
    gaps = [*((end, start) for (_, end), (start, _) in pairwise(spans)), (0, 0)]
    return [part for chunk, gap in zip(spans, gaps, strict=False) for part in (chunk, gap) if part[0] < part[1]]


def nums_before(spans: Sequence[Span]) -> list[int]:
    """Number of pieces in front of each chunk."""
    return list(accumulate((1 + (end < start) for (_, end), (start, _) in pairwise(spans)), initial=0))


def piece_keys(
    partition: Partition, token_ids: TokenIds, spans: Sequence[Span], keys: Sequence[bytes]
) -> tuple[bytes, ...] | None:
    """A key for each of `piece_spans`; None if there are no texts between chunks.

    A text between chunks is hashed with the chunk in front of it, so that the same line feed behind another passage is
    another piece; a hash of the text alone is appended (`chunk_cache.keys.text_names`).

    Args:
        token_ids: the whole prompt, shape [prompt_len].
        spans, keys: of the chunks.
    """
    texts = [(start, end, behind) for (start, end), (behind, _) in pairwise(spans) if end < behind]
    if not texts:
        return None
    with_chunk = chunk_keys(partition, token_ids, [(start, behind) for start, _, behind in texts])
    alone = chunk_keys(partition, token_ids, [(end, behind) for _, end, behind in texts])
    names = dict(zip(spans, keys, strict=True))
    for (_, end, behind), name, text in zip(texts, with_chunk, alone, strict=True):
        names[end, behind] = name + text[:TEXT_LEN]
    return tuple(names[part] for part in piece_spans(spans))


@dataclass(slots=True)
class Memo:
    """What `ChunkManager` last found and planned for a prompt, and at which version of index and store; for it alone.

    Attributes:
        words: rankings by words of the question, valid at any version.
        nums_before: the prompt's own, of its spans.
    """

    lookups: dict[int, Lookup] = field(default_factory=dict)
    words: tuple[Ranking, ...] | None = None
    nums_before: list[int] | None = None
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
        pieces: `piece_keys`; None = no text stands between the chunks, so that `keys` are all pieces.
        token_ids: the whole prompt, shape [prompt_len]; None where only its chunks are known.
        images: spans of its images, ascending; each is a run of ids that stand for its content.
        rope_starts: rotary position of the first token of each chunk; None = where it stands in the prompt, as always
            without images.
        memo: the manager's; not copied.
    """

    options: RequestOptions
    keys: tuple[bytes, ...]
    system: bytes = b""
    answer: SelectorAnswer | None = None
    partition: Partition = field(default_factory=Partition)
    unsupported: bool = False
    is_discovered: bool = False
    pieces: tuple[bytes, ...] | None = None
    token_ids: TokenIds | None = field(default=None, repr=False)
    images: tuple[Span, ...] = ()
    rope_starts: tuple[int, ...] | None = None
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    @classmethod
    def of(cls, options: RequestOptions, token_ids: TokenIds, partition: Partition, **others: Any) -> ChunkPrompt:
        """The prompt whose chunks are the spans of the options.

        Args:
            token_ids: the whole prompt, shape [prompt_len].
            others: fields that do not follow from these.
        """
        spans = options.spans
        keys = tuple(chunk_keys(partition, token_ids, spans))
        system = marks_of(token_ids[: spans[0][0]]) if spans else b""
        pieces = piece_keys(partition, token_ids, spans, keys)
        return cls(options, keys, system, partition=partition, pieces=pieces, token_ids=token_ids, **others)

    def context(self, chunk: int) -> tuple[bytes, ...]:
        """The pieces in front of a chunk."""
        if self.pieces is None:
            return self.keys[:chunk]
        if self.memo.nums_before is None:
            self.memo.nums_before = nums_before(self.options.spans)
        return self.pieces[: self.memo.nums_before[chunk]]

    @property
    def all_pieces(self) -> tuple[bytes, ...]:
        """Keys of all pieces, one object for all chunks; the context of a chunk is the beginning of it."""
        return self.keys if self.pieces is None else self.pieces

    @property
    def to_prepare(self) -> int | None:
        """The chunk that is computed behind the others, its neighbours, and kept as prepared; None = there is none."""
        return len(self.keys) - 1 if self.options.mode in PREPARING and len(self.keys) > 1 else None

    @property
    def leaves_method_open(self) -> bool:
        """Whether the client leaves it to the server how its chunks are reused."""
        opts = self.options
        return opts.mode == "auto" and opts.has_marks and not opts.names_method and not self.unsupported

    def rope_start(self, chunk: int) -> int:
        """Rotary position of the first token of a chunk."""
        return self.options.spans[chunk][0] if self.rope_starts is None else self.rope_starts[chunk]

    def has_images_up_to(self, chunk: int) -> bool:
        """Whether an image stands in a chunk or in front of it: its KV depends on more than token ids."""
        return bool(self.images) and self.images[0][0] < self.options.spans[chunk][1]

    def length(self, chunk: int) -> int:
        """Tokens of a chunk."""
        start, end = self.options.spans[chunk]
        return end - start
