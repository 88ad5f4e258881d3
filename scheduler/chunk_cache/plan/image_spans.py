"""Images among the tokens of a prompt: half-open, ascending spans of prompt positions.

Verbs: `end_outside` (where a range may end without cutting an image), `text_parts` (the text of a chunk), `num_within`.

An image is brought in whole or computed whole: its encoder makes all of it or nothing. Below ratio 1.0 its tokens are
not recomputed if they were brought in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.types import Span


def end_outside(end: int, images: Sequence[Span], page_size: int = 1) -> int:
    """The last position up to `end` at which a page ends and that lies within no image."""
    end -= end % page_size
    for first, last in reversed(images):
        if first < end < last:
            end = first - first % page_size
    return end


def text_parts(chunk: ChunkPlan, images: Sequence[Span]) -> Iterator[ChunkPlan]:
    """What a chunk brings in, without its images: a plan of each piece of text; the chunk itself where it has none."""
    if not num_within(chunk.dst_start, chunk.dst_end, images):
        yield chunk
        return
    begin = chunk.dst_start
    for first, last in (*images, (chunk.dst_end, chunk.dst_end)):
        end = min(first, chunk.dst_end)
        if begin < end:
            yield replace(
                chunk, src_offset=chunk.src_offset + begin - chunk.dst_start, dst_start=begin, num_reused=end - begin
            )
        begin = max(begin, last)


def num_within(start: int, end: int, images: Sequence[Span]) -> int:
    """Tokens of [start, end) that are part of an image."""
    return sum(max(0, min(end, last) - max(start, first)) for first, last in images)
