"""MarkedIds: the token ids of a marked prompt, and where its chunks are.

Verb: `encode_marked`. Promise: every piece is tokenized by itself, so a chunk has the same ids wherever it stands;
special tokens that the tokenizer adds to a text come once, around the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from chunk_cache.errors import request_error
from chunk_cache.prompt.marks import Mark, MarkedText

_PROBE = "a"


@dataclass(frozen=True)
class MarkedIds:
    """A tokenized prompt.

    Attributes:
        ids: all token ids.
        spans: `(start, end)` of each chunk, half-open, ascending.
        marks: the mark of each chunk.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    marks: tuple[Mark, ...]


def encode_marked(tokenizer: Any, marked: MarkedText, encode_kwargs: Mapping[str, Any] | None = None) -> MarkedIds:
    """Tokenizes the pieces of a marked text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        marked: the text, split.
        encode_kwargs: what stock SGLang would pass to `tokenizer.encode` for the whole text; decides about BOS.

    Raises:
        ChunkCacheRequestError: a chunk has no tokens.
    """
    head, tail = _special_tokens(tokenizer, encode_kwargs or {})
    ids = list(head)
    spans = []
    for piece_ids, mark in zip(_encode_pieces(tokenizer, marked.pieces), marked.marks, strict=True):
        start = len(ids)
        ids.extend(piece_ids)
        if mark is not None:
            if not piece_ids:
                raise request_error(mark.path, "the chunk has no tokens", "give it text, or remove it")
            spans.append((start, len(ids)))
    ids.extend(tail)
    return MarkedIds(ids, tuple(spans), tuple(mark for mark in marked.marks if mark is not None))


def _encode_pieces(tokenizer: Any, pieces: Sequence[str]) -> list[list[int]]:
    filled = [piece for piece in pieces if piece]
    if filled and getattr(tokenizer, "is_fast", False):
        only_ids = {"return_attention_mask": False, "return_token_type_ids": False}  # a third of the time
        encoded = iter(tokenizer(filled, add_special_tokens=False, **only_ids)["input_ids"])
    else:
        encoded = iter([tokenizer.encode(piece, add_special_tokens=False) for piece in filled])
    return [next(encoded) if piece else [] for piece in pieces]


_SPECIAL_TOKENS: WeakKeyDictionary[Any, dict[object, tuple[list[int], list[int]]]] = WeakKeyDictionary()


def _special_tokens(tokenizer: Any, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after any text; it is asked once."""
    known = _SPECIAL_TOKENS.setdefault(tokenizer, {})
    name = tuple(sorted(encode_kwargs.items()))
    if name not in known:
        known[name] = _probe_special_tokens(tokenizer, encode_kwargs)
    return known[name]


def _probe_special_tokens(tokenizer: Any, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    body = list(tokenizer.encode(_PROBE, add_special_tokens=False))
    whole = list(tokenizer.encode(_PROBE, **encode_kwargs))
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return whole[:start], whole[start + len(body) :]
    raise AssertionError(f"the tokenizer gives {whole} for {_PROBE!r}, which does not contain {body}")
