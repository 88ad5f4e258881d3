"""Splitting marked text."""

from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.options.request_options import MAX_CHUNKS
from chunk_cache.prompt.marks import Mark, Marks, is_blank, split_marked

SEP = "<|chunk|>"


def test_text_without_separators_is_not_marked():
    assert split_marked("no marks", SEP, "text") is None


def test_n_plus_one_separators_mark_n_chunks_and_nothing_is_stripped():
    marked = split_marked(f"system {SEP} A {SEP} B {SEP} question", SEP, "text")
    assert marked is not None
    assert marked.chunks == (" A ", " B ")
    assert marked.pieces == ("system ", " A ", " B ", " question")
    assert marked.text == "system  A  B  question"


def test_first_and_last_piece_may_be_empty():
    marked = split_marked(f"{SEP}A{SEP}", SEP, "text")
    assert marked is not None
    assert marked.chunks == ("A",)
    assert marked.text == "A"


@pytest.mark.parametrize("text", [f"a{SEP}b", SEP, f"{SEP}b", f"a{SEP}"])
def test_lone_separator_is_refused(text):
    with pytest.raises(ChunkCacheRequestError, match=r"^prompt\[1\]: only one separator"):
        split_marked(text, SEP, "prompt[1]")


@pytest.mark.parametrize("chunk", ["", " ", "\n\t", "\u200b", "\ufeff \n"])
def test_empty_chunk_is_refused(chunk):
    with pytest.raises(ChunkCacheRequestError, match=r"^text: chunk 1 .* is empty"):
        split_marked(f"a{SEP}b{SEP}{chunk}{SEP}c", SEP, "text")


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "\ufeff", "\u2060", "\xad", "\u200b \xad\t"])
def test_what_cannot_be_seen_is_blank(text):
    assert is_blank(text)
    assert not is_blank(f"{text}.{text}")


def test_the_number_of_chunks_is_bounded():
    marked = split_marked(SEP.join(["", *["a"] * MAX_CHUNKS, ""]), SEP, "text")
    assert marked is not None
    assert len(marked.chunks) == MAX_CHUNKS
    with pytest.raises(ChunkCacheRequestError, match=rf"^text: {MAX_CHUNKS + 1} chunks .*; mark longer chunks"):
        split_marked(SEP.join(["", *["a"] * (MAX_CHUNKS + 1), ""]), SEP, "text")


@pytest.mark.parametrize("separator", ["|", "<|", "-", "chunk", ".<", ">\n"])
def test_separators_that_stand_in_tags(separator):
    marks = Marks()
    text = marks.tag("Rome.\n", Mark("chunks[0]", "Rome."))
    marked = marks.split_at(separator, f"{text}Read {separator}A{separator} Who?", "prompt")
    assert marked is not None
    assert marked.chunks == ("Rome.", "A")
    assert marked.text == "Rome.\nRead A Who?"
