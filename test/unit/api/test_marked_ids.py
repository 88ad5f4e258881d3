"""Tokenizing marked text: whatever the tokenizer, marks change no token, and a passage keeps its ids in many places."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.prompt.marked_ids import encode_chunk, encode_marked, encode_prefix
from chunk_cache.prompt.marks import Mark, MarkedText
from tiny_models import make_tokenizer
from tokenizer_families import FAMILIES

TEXTS = [
    "Answer from the passages.\n\nParis is the capital of France.\nRome's river, the Tiber, is 405 km long.\n\n",
    "The café \u201cChez l\u2019ami\u201d opened in 1889 (probably), said Zoë. 東京は日本の首都です。 Ab\u0301c 🙂\n",
    "def main():\n    return {'probably': [1, 22, 333]}  # it's so\n",
] * 3
SPACE = ["like Llama 2", "Metaspace first", "Metaspace always", "like GPT-2, a space in front"]
"""Those that put a space in front of a text."""
NORMALIZERS = {
    "NFKC": normalizers.NFKC(),
    "strip": normalizers.Strip(),
    "shorter": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Replace("the", "")]),
}
WORDS = ["Paris", " is", "probably", "e", "\u0301", "é", "ﬁ", "…", "東京", "は", "🙂", "🧑‍🚀", "405", "'s", ".",
         "<|end|>", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "(", "the"]  # fmt: skip
VISIBLE = [word for word in WORDS if word.strip(" ")]
"""Of several spaces, one of them added, a slow tokenizer does not tell which."""


@cache
def tokenizer_of(name: str, normalizer: str = "", *, bos: bool = True) -> Any:
    core = FAMILIES[name](TEXTS)
    if normalizer:
        core.normalizer = NORMALIZERS[normalizer]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    if bos:
        core = tokenizer.backend_tokenizer
        added = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<|end|>")]
        core.post_processor = processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=added)
    return tokenizer


KINDS = [
    *((name, "") for name in FAMILIES),
    ("like GPT-2", "NFKC"),
    ("Metaspace first", "strip"),
    ("like Llama 3", "shorter"),
]


def marked(*pieces: str, foreign: bool = False) -> MarkedText:
    """Every second piece is a chunk."""
    marks = (Mark(f"chunk {i}", None if foreign else piece) if i % 2 else None for i, piece in enumerate(pieces))
    return MarkedText(pieces, tuple(marks))


def chunks_of(tokenizer: Any, *pieces: str) -> list[list[int]]:
    encoded = encode_marked(tokenizer, marked(*pieces))
    return [encoded.ids[start:end] for start, end in encoded.spans]


@pytest.mark.parametrize(("family", "normalizer"), KINDS)
@settings(deadline=None)  # the first text trains the tokenizer
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=5).map("".join), min_size=2, max_size=7), st.booleans())
def test_marks_change_no_token(family: str, normalizer: str, pieces: list[str], special: bool) -> None:
    tokenizer = tokenizer_of(family, normalizer)
    kwargs = {"add_special_tokens": special}
    encoded = encode_marked(tokenizer, marked(*pieces, foreign=True), kwargs)
    assert encoded.ids == tokenizer.encode("".join(pieces), **kwargs)
    bounds = [place for span in encoded.spans for place in span]
    assert bounds == sorted(bounds)
    assert all(start < end for start, end in encoded.spans)
    inner = range(1, len(encoded.ids) - 1) if special else range(len(encoded.ids))
    assert not encoded.spans or (encoded.spans[0][0] in inner and encoded.spans[-1][1] - 1 in inner)


PASSAGE = "Rome's river, the Tiber, is 405 km long (probably)."
LINE_BREAKS = [
    ("Answer.\n", "\n\nWhat?"), ("Answer from the passages.\n\n", ""), ("東京\n", " And now?"),
    ("Paris is.\n\n\n", ".\n"),    ("\n", "\nAnswer:"), (" \n", ")"), ("<|end|>\n", "\n\n\n\n"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("front", "behind"), LINE_BREAKS)
def test_a_passage_behind_a_line_break_has_the_ids_that_are_warmed(family: str, front: str, behind: str) -> None:
    tokenizer = tokenizer_of(family)
    ids, end_ids = encode_chunk(tokenizer, PASSAGE, "text")
    assert chunks_of(tokenizer, front, PASSAGE, behind) == [ids]
    for space in ("\n", " ", "\n\n", " \n\t"):
        assert encode_chunk(tokenizer, PASSAGE + space, "text")[0] == ids
        assert chunks_of(tokenizer, front, PASSAGE + space, "Who?") == [ids]
        assert chunks_of(tokenizer, front, PASSAGE + space, f"{space}Who?") == [ids]
    assert tokenizer.decode(ids).strip() == PASSAGE[:-2]
    assert tokenizer.decode(end_ids).strip() == ")."


@pytest.mark.parametrize("family", FAMILIES)
def test_a_passage_behind_blanks_has_its_own_ids(family: str) -> None:
    """The space is part of the first token, so that the text in front does not depend on the passage."""
    tokenizer = tokenizer_of(family)
    prefix = encode_prefix(tokenizer, "Context: ")
    for passage in (PASSAGE, "Paris is it, probably"):
        encoded = encode_marked(tokenizer, marked("Context: ", passage, " What?"))
        assert encoded.ids[: encoded.spans[0][0]] == prefix
        assert chunks_of(tokenizer, "Context: ", passage, "\n") == chunks_of(tokenizer, "It is (so). ", passage, "")
        (ids,) = chunks_of(tokenizer, "Context: ", passage, "\n")
        assert ids == encode_chunk(tokenizer, f" {passage}", "text")[0], "so it can be warmed"
        if family in SPACE:
            assert chunks_of(tokenizer, "", passage, ".") == [ids]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["", "Answer from the passages.\n\n", "Paris is the capital: "])
def test_what_stands_in_front_of_a_chunk(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    encoded = encode_marked(tokenizer, marked(text, PASSAGE, ""))
    assert encode_prefix(tokenizer, text) == encoded.ids[: encoded.spans[0][0]]
    assert encoded.ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("bos", [True, False])
def test_a_prefix_of_which_a_normalizer_leaves_nothing(*, bos: bool) -> None:
    tokenizer = tokenizer_of("like Llama 3", "shorter", bos=bos)
    assert encode_prefix(tokenizer, "\u0301") == [tokenizer.bos_token_id] * bos


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_prefixes_of_a_conversation_that_grows(family: str) -> None:
    """The newest message is marked; requests have as much in common as they have without marks."""
    tokenizer = tokenizer_of(family)
    turns = [f"<|end|>\nuser\nRome's river {i} is long.\n<|end|>\nassistant\nIt is (probably)…\n" for i in range(4)]
    sent = [encode_marked(tokenizer, marked("".join(turns[:i]), turn, "")).ids for i, turn in enumerate(turns)]
    assert sent == [tokenizer.encode("".join(turns[: i + 1])) for i in range(len(turns))]


def test_a_token_with_text_of_both_sides_is_of_neither() -> None:
    tokenizer = tokenizer_of("like GPT-2", bos=False)
    encoded = encode_marked(tokenizer, marked("It is prob", "ably so. is prob", "ably"))
    assert [tokenizer.decode(encoded.ids[a:b]) for a, b in encoded.spans] == [" so. is "]
    assert tokenizer.decode(encoded.ids) == "It is probably so. is probably"


def test_a_chunk_without_a_token_of_its_own() -> None:
    tokenizer = tokenizer_of("like GPT-2")
    with pytest.raises(ChunkCacheRequestError, match=r"^chunk 1: the chunk has no token of its own; give it text"):
        encode_marked(tokenizer, marked("prob", "ab", "ly"))
    assert encode_marked(tokenizer, marked("prob", "ab", "ly Paris", "", "", " is", "", foreign=True)).marks == (
        Mark("chunk 5"),
    )


def test_signs_alone_are_a_chunk() -> None:
    tokenizer = make_tokenizer()
    assert [tokenizer.decode(ids) for ids in chunks_of(tokenizer, "a\n", " *** \n", "b")] == [" ***"]


@pytest.mark.parametrize(("family", "text"), [("like Llama 3", "<|end|>"), ("like Llama 2", "b\u0301")])
def test_a_chunk_whose_first_token_ends_behind_its_last_letter(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    (ids,) = chunks_of(tokenizer, "Paris is\n", f"{text}\n", "")
    assert tokenizer.convert_ids_to_tokens(ids) == [text]
    assert encode_chunk(tokenizer, f"{text}).", "text")[0] == ids


def test_special_tokens_in_the_text_are_kept_whole() -> None:
    tokenizer = tokenizer_of("like Llama 3")
    end = tokenizer.eos_token_id
    assert chunks_of(tokenizer, "", "<|end|>Paris<|end|> is", "")[0][0] == end
    assert end not in chunks_of(tokenizer, "", "Paris <|e", "nd|>")[0]


class Slow:
    """A tokenizer that does not tell where its tokens stand."""

    is_fast = False

    def __init__(self, core: Any) -> None:
        self.encode = core.encode
        self.decode = core.decode


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(VISIBLE), max_size=12).map("".join), min_size=2, max_size=7), st.booleans())
def test_a_slow_tokenizer_gives_the_ids_and_chunks_of_a_fast_one(family: str, pieces: list[str], special: bool) -> None:
    tokenizer = tokenizer_of(family)
    text, kwargs = marked(*pieces, foreign=True), {"add_special_tokens": special}
    assert encode_marked(Slow(tokenizer), text, kwargs) == encode_marked(tokenizer, text, kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_slow_tokenizer_in_a_long_text(family: str, caplog: Any) -> None:
    tokenizer = tokenizer_of(family)
    text = marked(*(piece for i in range(20) for piece in (f"\n\n{i}: ", TEXTS[i % 3])), "\n\nWho?")
    assert encode_marked(Slow(tokenizer), text) == encode_marked(tokenizer, text)
    assert encode_chunk(Slow(tokenizer), PASSAGE, "text") == encode_chunk(tokenizer, PASSAGE, "text")
    assert encode_prefix(Slow(tokenizer), "Paris is: ") == encode_prefix(tokenizer, "Paris is: ")
    assert not caplog.records


class SpacedSlow(Slow):
    """As Llama's: it drops the space in front of a text, puts one in front of special tokens, and needs a token."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.decode = lambda ids, **kwargs: (
            core.decode([ids[0], *ids[1:]], **kwargs).removeprefix(" ").replace("<|end|>", " <|end|>")
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slow", [Slow, SpacedSlow])
def test_a_slow_tokenizer_and_text_with_bad_characters_and_special_tokens(family: str, slow: type[Slow]) -> None:
    tokenizer = tokenizer_of(family)
    text = marked(
        "\ufffd<|end|> Paris\n", "<|end|>Rome \ufffd\ufffd is", "\n\n\ufffd.\n", "東京 \ufffd " * 30 + "is", "\ufffd"
    )
    assert encode_marked(slow(tokenizer), text) == encode_marked(tokenizer, text)


class BadSlow(Slow):
    """One that does not decode tokens to their text."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.decode = lambda ids, **_: "?" * len(ids)


def test_a_slow_tokenizer_that_does_not_decode_gets_the_pieces_and_a_warning(caplog: Any) -> None:
    tokenizer = BadSlow(make_tokenizer())
    with caplog.at_level(logging.WARNING):
        encoded = encode_marked(tokenizer, marked("sys", "aa", "", "bb", "q"))
        without = encode_marked(tokenizer, marked("sys", "aa", "", "bb", "q"), {"add_special_tokens": False})
    assert len(caplog.records) == 2
    assert (
        "BadSlow makes of a marked text do not decode to it, so it is tokenized piece by piece (chunk 1," in caplog.text
    )
    assert without.ids == encoded.ids[1:] == [i for one in ("sys", "aa", "bb", "q") for i in tokenizer.encode(one)[1:]]
    assert without.spans == tuple((start - 1, end - 1) for start, end in encoded.spans)
    assert encode_chunk(tokenizer, "aa", "text")[0] == encoded.ids[slice(*encoded.spans[0])]
    for chunk in ("aa\n", " aa", "aa \n\n"):
        assert encode_chunk(tokenizer, chunk, "text")[0] == chunks_of(tokenizer, "sys\n", chunk, "q")[0]
        assert encode_chunk(tokenizer, chunk, "text")[0] == encode_chunk(tokenizer, "aa", "text")[0]
