"""Splitting marked text, and tokenizing its pieces one by one."""

from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.options.request_options import MAX_CHUNKS
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import split_marked
from tiny_models import make_tokenizer

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


@pytest.mark.parametrize("chunk", ["", " ", "\n\t"])
def test_empty_chunk_is_refused(chunk):
    with pytest.raises(ChunkCacheRequestError, match=r"^text: chunk 1 .* is empty"):
        split_marked(f"a{SEP}b{SEP}{chunk}{SEP}c", SEP, "text")


@pytest.mark.parametrize("add_bos", [True, False])
def test_chunk_has_the_same_ids_wherever_it_stands(add_bos):
    tokenizer = make_tokenizer(add_bos=add_bos)
    chunk = "the tale of the rose"
    found = []
    for text in (f"{SEP}{chunk}{SEP}", f"In the end{SEP}other{SEP}{chunk}{SEP} what?", f"x{SEP}{chunk}{SEP}y{SEP}z"):
        marked = split_marked(text, SEP, "text")
        assert marked is not None
        encoded = encode_marked(tokenizer, marked)
        index = marked.chunks.index(chunk)
        start, end = encoded.spans[index]
        found.append(encoded.ids[start:end])
    assert found[0] == found[1] == found[2] == tokenizer.encode(chunk, add_special_tokens=False)


def test_bos_comes_once_and_the_pieces_give_the_prompt():
    tokenizer = make_tokenizer(add_bos=True)
    marked = split_marked(f"sys{SEP}aa{SEP}bb{SEP}q", SEP, "text")
    assert marked is not None
    encoded = encode_marked(tokenizer, marked)
    assert encoded.ids[0] == tokenizer.bos_token_id
    assert encoded.ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(encoded.ids[1:]) == "sysaabbq"
    assert [tokenizer.decode(encoded.ids[start:end]) for start, end in encoded.spans] == ["aa", "bb"]
    without = encode_marked(tokenizer, marked, {"add_special_tokens": False})
    assert without.ids == encoded.ids[1:]
    assert without.spans == tuple((start - 1, end - 1) for start, end in encoded.spans)


def test_a_tokenizer_that_adds_a_final_token_adds_it_once_at_the_end():
    from tokenizers import processors

    tokenizer = make_tokenizer(add_bos=False)
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    marked = split_marked(f"a{SEP}b{SEP}c", SEP, "text")
    assert marked is not None
    encoded = encode_marked(tokenizer, marked)
    assert encoded.ids[-1] == tokenizer.eos_token_id
    assert encoded.ids.count(tokenizer.eos_token_id) == 1


def test_separator_that_is_a_special_token_is_never_tokenized():
    tokenizer = make_tokenizer()
    separator = "<|user|>"
    marked = split_marked(f"a{separator}b{separator}c", separator, "text")
    assert marked is not None
    encoded = encode_marked(tokenizer, marked)
    assert tokenizer.convert_tokens_to_ids(separator) not in encoded.ids


def test_the_number_of_chunks_is_bounded():
    marked = split_marked(SEP.join(["", *["a"] * MAX_CHUNKS, ""]), SEP, "text")
    assert marked is not None
    assert len(marked.chunks) == MAX_CHUNKS
    with pytest.raises(ChunkCacheRequestError, match=rf"^text: {MAX_CHUNKS + 1} chunks .*; mark longer chunks"):
        split_marked(SEP.join(["", *["a"] * (MAX_CHUNKS + 1), ""]), SEP, "text")
