r"""MarkedIds: the token ids of a marked prompt, and where its chunks are.

Verbs: `encode_marked`; `encode_prefix` and `encode_chunk`, for what is warmed and in no prompt yet. Promise: the ids
are those of the same text without marks, which is tokenized once, as a whole. Only a tokenizer that neither tells where
its tokens stand nor decodes them to the text is given the pieces one by one. A chunk is a run of these tokens:

    text, in tokens  Read| this|:|\n|\n|Paris| is| in| France|.\n|Rome| is| in| Italy|.\n|\n|Who|?
    marked                           ~~~~~~~~~~~~~~~~~~~     ~~~~~~~~~~~~~~~~~

- It begins with its first visible character, or with the space in front of that, wherever the mark stands: most
  tokenizers make one token of the two, and what is in front of a chunk must not depend on its first word.
- It ends with its last letter or digit: signs and white space behind that may become one token with each other and with
  what follows, so the same passage in front of another line break would be another chunk. If no token ends there
  (a letter and its accent may be one), the chunk is its first token.
- A token with visible text of both sides of a mark belongs to neither.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunk_cache.errors import request_error
from chunk_cache.prompt.marks import Mark, MarkedText, trimmed, word_end
from chunk_cache.prompt.token_places import TokenPlaces
from chunk_cache.types import Span

logger = logging.getLogger(__name__)

_PROBE = "a"
_LINE_BREAK = "\n\n"
"""What mostly stands around passages."""


@dataclass(frozen=True)
class MarkedIds:
    """A tokenized prompt.

    Attributes:
        ids: all token ids.
        spans: `(start, end)` of each chunk, half-open, ascending.
        marks: the mark of each chunk.
    """

    ids: list[int]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]

    @property
    def chunk_ids(self) -> tuple[str | None, ...]:
        """The client's names of the chunks; empty = there are none."""
        ids = tuple(mark.id for mark in self.marks)
        return ids if any(ids) else ()


def encode_marked(tokenizer: Any, marked: MarkedText, encode_kwargs: Mapping[str, Any] | None = None) -> MarkedIds:
    """Tokenizes a marked text.

    Args:
        tokenizer: a Hugging Face tokenizer. Of one that does not tell where its tokens stand (a slow one), they
            are decoded to find out.
        marked: the text, split.
        encode_kwargs: what stock SGLang would pass to `tokenizer.encode` for the whole text; decides about BOS.

    Returns:
        its ids and chunks; a mark of another service without a token of its own is left out.

    Raises:
        ChunkCacheRequestError: a chunk that was marked for us has no token of its own.
    """
    encode = _encode_fast if getattr(tokenizer, "is_fast", False) else _encode_slow
    ids, ranges = encode(tokenizer, marked, encode_kwargs or {})
    found = [(span, mark) for span, mark in zip(ranges, marked.marks, strict=True) if mark is not None]
    for (start, end), mark in found:
        if start >= end and not mark.is_foreign:
            raise request_error(mark.path, "the chunk has no token of its own", "give it text, or remove it")
    found = [(span, mark) for span, mark in found if span[0] < span[1]]
    return MarkedIds(ids, tuple(span for span, _ in found), tuple(mark for _, mark in found))


def encode_chunk(tokenizer: Any, text: str, path: str) -> tuple[list[int], list[int]]:
    """The ids of a chunk behind a line break, and those of what follows: its signs at the end, and a line break.

    Args:
        text: the chunk, with visible text.

    Raises:
        ChunkCacheRequestError: it has no token of its own.
    """
    marked = MarkedText((_LINE_BREAK, text, _LINE_BREAK), (None, Mark(path, text), None))
    encoded = encode_marked(tokenizer, marked, {"add_special_tokens": False})
    ((start, end),) = encoded.spans
    return encoded.ids[start:end], encoded.ids[end:]


def encode_prefix(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text in front of the first chunk, BOS included; the same whatever the chunk."""
    if text and not text[-1].isspace():
        head, body, _ = _parts(tokenizer, text, {})
        if body:
            return head + body
        text = ""  # a normalizer leaves nothing of it
    encoded = encode_marked(tokenizer, MarkedText((text, _PROBE), (None, Mark("prefix", _PROBE))))
    return encoded.ids[: encoded.spans[0][0]]


def _encode_fast(tokenizer: Any, marked: MarkedText, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[Span]]:
    """The ids of the text, and the tokens of each piece."""
    text = marked.text
    asked = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    unasked = {"return_attention_mask": False, "return_token_type_ids": False}  # they take a third of the time
    encoded = tokenizer(text, **encode_kwargs, **asked, **unasked)
    own = np.flatnonzero(np.array(encoded["special_tokens_mask"]) == 0)  # special tokens have no place in the text
    first, last = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
    places = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[first:last]
    # Offsets may leave out white space (`trim_offsets`) or what a normalizer drops: both count for the token behind.
    # Tokens of one character overlap.
    ends = np.maximum.accumulate(places[:, 1])
    starts = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]]))
    return list(encoded["input_ids"]), _ranges(marked, range(first, last), starts.__getitem__, ends.__getitem__)


def _encode_slow(tokenizer: Any, marked: MarkedText, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[Span]]:
    """The same of a tokenizer that does not tell where its tokens stand."""
    text = marked.text
    ids = list(tokenizer.encode(text, **encode_kwargs))
    head, _, tail = _parts(tokenizer, _PROBE, encode_kwargs)
    first, last = len(head), len(ids) - len(tail)
    places = TokenPlaces.find(tokenizer, ids[first:last], text) if ids == head + ids[first:last] + tail else None
    if places is None:
        return _encode_pieces(tokenizer, marked, encode_kwargs)
    return ids, _ranges(marked, range(first, last), places.start, places.end)


def _ranges(marked: MarkedText, own: range, start_of: Callable[[int], int], end_of: Callable[[int], int]) -> list[Span]:
    """The tokens of each piece, by the place in the text of each token, counted in the text's `own`."""
    ranges: list[Span] = []
    tokens, done = range(len(own)), 0
    for visible_end, *bounds in _cores(marked):
        begin, end, sign_end = (bisect_right(tokens, bound, lo=done, key=end_of) for bound in bounds)
        while begin < sign_end and start_of(begin) < visible_end:
            begin += 1
        if end <= begin < sign_end:
            end = bisect_right(tokens, end_of(begin), lo=begin, key=end_of)
        done = max(begin, end)
        ranges.append((own.start + begin, own.start + done))
    return ranges


def _cores(marked: MarkedText) -> Iterator[tuple[int, int, int, int]]:
    """For each piece, in characters: where visible text in front of it ends, where it begins, where its last word ends,
    and where it ends."""
    text, at, visible_end = marked.text, 0, 0
    for piece in marked.pieces:
        lead, core, _ = trimmed(piece)
        start, end = at + len(lead), at + len(piece)
        if core:
            begin, core_end = start - (text[start - 1 : start] == " "), start + len(core)
            yield visible_end, begin, start + word_end(core), core_end
            visible_end = core_end
        else:
            yield visible_end, end, end, end
        at = end


def _encode_pieces(
    tokenizer: Any, marked: MarkedText, encode_kwargs: Mapping[str, Any]
) -> tuple[list[int], list[Span]]:
    """The ids of pieces that are tokenized one by one, and the tokens of each, without white space at its ends."""
    logger.warning(
        "Chunk cache: the tokens that %s makes of a marked text do not decode to it, so it is tokenized piece by piece "
        "(%s ...), and the model may read other tokens at their borders than without marks; use a fast tokenizer",
        type(tokenizer).__name__,
        ", ".join(mark.path for mark in marked.marks if mark is not None)[:80],
    )
    ids, _, tail = _parts(tokenizer, _PROBE, encode_kwargs)
    ranges = []
    for piece, mark in zip(marked.pieces, marked.marks, strict=True):
        texts = ("", piece, "") if mark is None else trimmed(piece)
        lead, core, trail = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in texts)
        start = len(ids) + len(lead)
        ranges.append((start, start + len(core)))
        ids += [*lead, *core, *trail]
    return ids + tail, ranges


def _parts(tokenizer: Any, text: str, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """What the tokenizer puts in front of a text, which is not empty, the ids of the text, and what it puts behind."""
    body = list(tokenizer.encode(text, add_special_tokens=False))
    whole = list(tokenizer.encode(text, **encode_kwargs))
    start = next((i for i in range(len(whole) + 1) if whole[i : i + len(body)] == body), None)
    assert start is not None, f"the tokenizer gives {whole} for {text!r}, which does not contain {body}"
    return whole[:start], body, whole[start + len(body) :]
