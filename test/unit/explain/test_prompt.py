from __future__ import annotations

import io
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import split_marked
from chunk_cache_tools import local_tokenizer
from chunk_cache_tools.explain.layout import lay_out, segments, text_width
from chunk_cache_tools.explain.shown_prompt import (
    CONTINUED,
    PromptTokens,
    read_prompt,
    token_texts,
    visible,
)
from chunk_cache_tools.local_tokenizer import PlainTokenizer, load_shape, load_tokenizer
from tiny_models import make_model

SEP = "<|chunk|>"


def test_the_texts_of_the_tokens_make_up_the_prompt(tokens):
    assert tokens.texts[0] == "<|bos|>"
    shown = "".join(text for text in tokens.texts[1:] if text != CONTINUED)
    assert shown == "Read.\nParis is in France.\nRome costs $5 <now> & then.\n東京 is \u202ein\nJapan\nWhere?"
    start, end = tokens.spans[0]
    assert "".join(tokens.texts[start:end]) == "Paris is in France"


def test_a_character_of_several_tokens_is_shown_once(tokenizer):
    ids = tokenizer.encode("a東b", add_special_tokens=False)
    assert token_texts(tokenizer, ids) == ["a", "東", CONTINUED, CONTINUED, "b"]


def test_a_broken_character_is_shown_as_the_tokenizer_writes_it(tokenizer):
    ids = tokenizer.encode("東", add_special_tokens=False)[:1] + tokenizer.encode("b", add_special_tokens=False)
    assert token_texts(tokenizer, ids) == [tokenizer.convert_ids_to_tokens(ids[0]), "b"]
    assert token_texts(tokenizer, ids[:1]) == [tokenizer.convert_ids_to_tokens(ids[0])]


def test_the_spaces_of_sentencepiece_are_kept():
    vocab = {"<unk>": 0, "\u2581Rome": 1, "\u2581is": 2, "!": 3, "\u2581": 4}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert token_texts(tokenizer, [1, 2, 3, 4]) == [" Rome", " is", "!", " "]


def test_visible():
    assert visible("a b\n\tc") == "a b\u21b5\u21e5c"
    assert visible("\x00\u202e\ud800") == "\\x00\\u202e\\ud800"
    assert visible("東京 $é") == "東京 $é"


@pytest.mark.parametrize("break_", ["\n", "\r\n"])
@pytest.mark.parametrize("num_breaks", [0, 1, 2])
def test_a_prompt_is_read_without_the_last_line_break(tmp_path, monkeypatch, break_, num_breaks):
    text = f"Read.{SEP}A{break_}{SEP} B{SEP}Who?" + break_ * num_breaks
    path = tmp_path / "prompt.txt"
    path.write_bytes(text.encode())
    expected = ("Read.", f"A{break_}", " B", "Who?" + break_ * max(0, num_breaks - 1))
    assert read_prompt(str(path), SEP).pieces == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_prompt("-", SEP).pieces == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"no marks",
            "no chunk is marked with '<|chunk|>'; put one before and one after each chunk, or name the server's",
        ),
        (b"one <|chunk|> mark", "only one separator"),
        (b"a<|chunk|> <|chunk|>b", "chunk 0 between two separators '<|chunk|>' is empty"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path, content, words):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ChunkCacheRequestError) as caught:
        read_prompt(str(path), SEP)
    assert str(caught.value).startswith(f"--prompt {path}: ")
    assert words in str(caught.value)


def test_a_folder_without_tokenizer_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ChunkCacheRequestError, match=r"^--tokenizer: no tokenizer in .*; name a folder"):
        load_tokenizer(str(tmp_path))


# Layout.


def test_segments_cover_the_prompt():
    assert [(one.name, one.start, one.end) for one in segments([(2, 5), (5, 7), (9, 12)], 15)] == [
        ("head", 0, 2),
        ("chunk 0", 2, 5),
        ("chunk 1", 5, 7),
        ("text", 7, 9),
        ("chunk 2", 9, 12),
        ("question", 12, 15),
    ]
    assert [one.name for one in segments([(0, 5)], 5)] == ["chunk 0"]


@pytest.mark.parametrize("max_width", [12, 40, 1000])
@pytest.mark.parametrize("shown", [(0, None), (3, 30), (20, 21)])
@pytest.mark.parametrize("cell_width", [None, 0.5])
def test_every_token_stands_once_in_order_and_no_line_is_too_wide(tokens, max_width, shown, cell_width):
    shown = (shown[0], shown[1] or len(tokens.texts))
    lines = lay_out(tokens, shown, max_width, cell_width)
    assert [cell.position for line in lines for cell in line.cells] == list(range(*shown))
    for line in lines:
        left = 0.0
        for cell in line.cells:
            assert cell.left == left
            assert cell.width == cell_width or cell.width >= text_width(cell.text) + 1
            left += cell.width
        assert left <= max_width
        assert all(line.segment.start <= cell.position < line.segment.end for cell in line.cells)
    named = [line.segment.start for line in lines if line.is_first]
    assert named == sorted({line.segment.start for line in lines})


def test_a_line_is_full_before_the_next_begins():
    tokens = PromptTokens(("ab", " c", "東京", "x" * 99, "\n"), ((0, 4),))
    lines = lay_out(tokens, (0, 5), 12)
    assert [[cell.text for cell in line.cells] for line in lines] == [
        ["ab", " c", "東京"],
        ["x" * 39 + "\u2026"],  # too long for any line, but never lost
        ["\u21b5"],
    ]
    assert [cell.width for cell in lines[0].cells] == [3, 3, 5]


def test_without_transformers_the_tokens_are_the_same(tmp_path, tokenizer, monkeypatch):
    tokenizer.save_pretrained(tmp_path)
    plain = PlainTokenizer(str(tmp_path), "--tokenizer")
    text = "Rome costs $5 <now> & then. 東京 is in\nJapan."
    ids = tokenizer.encode(text)
    assert plain.encode(text) == ids
    assert plain.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert token_texts(plain, ids) == token_texts(tokenizer, ids)
    marked = split_marked(f"Read. {SEP}Rome costs $5.{SEP} 東京 is\n{SEP}Why?", SEP, "text")
    assert marked is not None
    assert encode_marked(plain, marked) == encode_marked(tokenizer, marked)
    assert len(plain) == len(tokenizer)
    monkeypatch.setattr(local_tokenizer, "_has_transformers", lambda: False)
    with pytest.raises(ChunkCacheRequestError, match=r"^--tokenizer: no tokenizer.json in 'org/name' .*transformers"):
        load_tokenizer("org/name")
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 3}}')
    assert load_shape(str(tmp_path), "MODEL") == (3, False)
    hybrid = str(make_model("qwen3_5", tmp_path / "hybrid"))
    without = load_shape(hybrid, "MODEL")
    assert without.has_states
    monkeypatch.undo()
    assert load_shape(hybrid, "MODEL") == without
    monkeypatch.setattr(local_tokenizer, "_has_transformers", lambda: False)
    with pytest.raises(ChunkCacheRequestError, match=r"^MODEL: no model in 'org/name'"):
        load_shape("org/name", "MODEL")
