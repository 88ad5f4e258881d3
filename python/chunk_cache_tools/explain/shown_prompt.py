"""Prompt: a marked text, and its tokens as people read them.

Verbs: `read_text` and `read_prompt` (from a file), `tokenize`, `token_texts` and `visible` (readable tokens).
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import MarkedText, split_marked
from chunk_cache.types import Span

CONTINUED = "\u22ef"
"""Text of a token that continues the character of the token before it."""

_BAD_CHAR = "\ufffd"
_MAX_CHAR_TOKENS = 4  # a character is at most four bytes of UTF-8
_SPACE_MARK = "\u2581"  # SentencePiece writes a space like this
_VISIBLE = {"\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d", "\u00a0": " "}


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of a prompt.

    Attributes:
        texts: one readable text per token.
        spans: `(start, end)` of each chunk.
    """

    texts: tuple[str, ...]
    spans: tuple[Span, ...]


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`; a line break at its end, which editors add, is left out.

    Other line breaks stay as they are, since `\\r\\n` has other tokens than `\\n`.

    Raises:
        ChunkCacheRequestError: the text cannot be read.
    """
    where = f"--prompt {path}"
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise request_error(where, problem, "give the path of a text file, or -") from None
    except UnicodeDecodeError:
        raise request_error(where, "is not UTF-8", "give the path of a text file") from None
    return re.sub(r"\r?\n\Z", "", text)


def read_prompt(path: str, separator: str) -> MarkedText:
    """The text of a file or of standard input, as `read_text`, with its marks.

    Raises:
        ChunkCacheRequestError: the text cannot be read, or marks no chunk.
    """
    where = f"--prompt {path}"
    marked = split_marked(read_text(path), separator, where)
    if marked is None:
        problem = f"no chunk is marked with {separator!r}"
        remedy = "put one before and one after each chunk, or name the server's separator by --separator"
        raise request_error(where, problem, remedy)
    return marked


def tokenize(tokenizer: Any, marked: MarkedText) -> PromptTokens:
    """The tokens that the server makes of a marked text.

    Raises:
        ChunkCacheRequestError: a chunk has no tokens.
    """
    marked_ids = encode_marked(tokenizer, marked)
    return PromptTokens(tuple(token_texts(tokenizer, marked_ids.ids)), marked_ids.spans)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per id. If several tokens make one character, the first gets it and the others are `CONTINUED`."""
    texts: list[str] = []
    while len(texts) < len(ids):
        begin = len(texts)
        text, num = _token_text(tokenizer, ids[begin]), 1
        while _BAD_CHAR in text and num < min(_MAX_CHAR_TOKENS, len(ids) - begin):
            num += 1
            text = tokenizer.decode(ids[begin : begin + num], clean_up_tokenization_spaces=False)
        if _BAD_CHAR in text:
            text, num = tokenizer.convert_ids_to_tokens(ids[begin]), 1
        texts += [text, *[CONTINUED] * (num - 1)]
    return texts


def _token_text(tokenizer: Any, token_id: int) -> str:
    raw = tokenizer.convert_ids_to_tokens(token_id)
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if not text:
        return str(raw).replace(_SPACE_MARK, " ")
    # A decoder that joins words drops the space of the first one.
    return f" {text}" if raw.startswith(_SPACE_MARK) and not text.startswith(" ") else text


def visible(text: str) -> str:
    """The text with symbols for line breaks and tabs, and escapes for other control characters; spaces stay."""
    return "".join(_visible_char(char) for char in text)


def _visible_char(char: str) -> str:
    if char in _VISIBLE:
        return _VISIBLE[char]
    # Formatting characters turn the writing direction or join signs; in a single token they only confuse.
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return char.encode("unicode_escape").decode("ascii")
    return char
