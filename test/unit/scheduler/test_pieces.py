"""Pieces: what a chunk stands behind is the chunks in front of it and the texts between them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt, nums_before, piece_keys, piece_spans

PARTITION = Partition()
IDS = list(range(100))


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    bounds = sorted(draw(st.lists(st.integers(0, 99), min_size=2, max_size=12, unique=True)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


@st.composite
def touching(draw: st.DrawFn) -> list[tuple[int, int]]:
    return list(pairwise(sorted(draw(st.lists(st.integers(0, 99), min_size=2, max_size=8, unique=True)))))


@given(spans() | touching())
def test_pieces_cover_all_from_the_first_chunk_to_the_last(chunks: list[tuple[int, int]]) -> None:
    pieces = piece_spans(chunks)
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    assert (pieces[0][0], pieces[-1][1]) == (chunks[0][0], chunks[-1][1])
    assert [pieces[num] for num in nums_before(chunks)] == chunks


@given(touching())
def test_without_text_between_them_the_pieces_are_the_chunks(chunks: list[tuple[int, int]]) -> None:
    keys = tuple(chunk_key(PARTITION, IDS[a:b]) for a, b in chunks)
    assert piece_keys(PARTITION, IDS, chunks, keys) is None
    prompt = ChunkPrompt(RequestOptions(spans=tuple(chunks)), keys)
    assert [prompt.context(i) for i in range(len(keys))] == [keys[:i] for i in range(len(keys))]


def test_text_between_chunks_belongs_to_the_chunk_in_front_of_it() -> None:
    a, b, c, gap = [1, 2, 3], [4, 5], [6, 7, 8], [9]

    def context(*parts: list[int]) -> tuple[bytes, ...]:
        """Of the chunk `c` behind chunks with a gap between each."""
        ids = [token for part in parts for token in (*part, *gap)] + c
        starts = [sum(len(part) + 1 for part in parts[:i]) for i in range(len(parts) + 1)]
        chunks = [(at, at + len(part)) for at, part in zip(starts, [*parts, c], strict=True)]
        keys = tuple(chunk_key(PARTITION, ids[first:last]) for first, last in chunks)
        pieces = piece_keys(PARTITION, ids, chunks, keys)
        prompt = ChunkPrompt(RequestOptions(spans=tuple(chunks)), keys, pieces=pieces)
        return prompt.context(len(parts))

    assert len(context(a, b)) == 4
    assert {chunk_key(PARTITION, a), chunk_key(PARTITION, b)} <= set(context(a, b))
    assert set(context(a, b)) == set(context(b, a)), "the same passages, each with the same text behind it"
    assert set(context(a)).isdisjoint(context(b)), "the same text behind another passage is another piece"
