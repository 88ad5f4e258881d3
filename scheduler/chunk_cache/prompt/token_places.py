"""TokenPlaces: where tokens stand in their text, of a tokenizer that does not tell.

Verbs: `TokenPlaces.find`; `start` and `end` of a token. Tokens are decoded, and the result is compared with the text:

- White space does not count in the comparison: decoders drop it or add some at the beginning and around special tokens.
- Bytes of one character may be several tokens. Each of them stands at the whole character, as in the offsets of fast
  tokenizers.
- A run of tokens is decoded behind one that stands in front of it, since decoders treat the first one differently.

The text is compared in blocks of `_BLOCK_LEN` tokens, each decoded once; inside a block only what is asked for is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BLOCK_LEN = 32
_MAX_CHAR_TOKENS = 4
"""Tokens of one character: its bytes."""
_MAX_FRONT_LEN = 16
_BAD_CHAR = "\ufffd"


@dataclass(frozen=True)
class _Block:
    """Tokens from `begin` on, where a character begins, at `place` in the text.

    They are decoded from `front` on; `front_len` characters of the result are of the tokens in front.
    """

    begin: int
    place: int
    front: int
    front_len: int


class TokenPlaces:
    """See the head of this file. Made by `find`."""

    def __init__(self, tokenizer: Any, ids: Sequence[int], text: str) -> None:
        self._tokenizer, self._ids, self._text = tokenizer, ids, text
        self._blocks = [_Block(0, 0, 0, 0)]
        self._known: dict[int, tuple[int, str]] = {}

    @classmethod
    def find(cls, tokenizer: Any, ids: Sequence[int], text: str) -> TokenPlaces | None:
        """The places of the tokens of a text; None where they do not decode to it.

        Args:
            ids: without what the tokenizer puts in front of a text and behind it.
        """
        places = cls(tokenizer, ids, text)
        end = 0
        while end < len(ids):
            wanted = min(end + _BLOCK_LEN, len(ids))
            borders = range(wanted, min(wanted + _BLOCK_LEN, len(ids)) + 1)
            end = next((border for border in borders if places._is_border(border)), 0)
            if not end:
                return None
            places._begin_block(end)
        return None if text[places.start(len(ids)) :].strip() else places

    def start(self, token: int) -> int:
        """Where the characters end that stand in tokens in front of this one as a whole."""
        # Some decoders make bad characters of a whole run of bytes if the last character is cut.
        num_back = 0 if self._is_border(token) else _MAX_CHAR_TOKENS - 1
        return max(self._match(border)[0] for border in range(max(token - num_back, 0), token + 1))

    def end(self, token: int) -> int:
        """Where the last character of this token ends, which may be the next token's too. A space that the tokenizer
        adds stands at the character behind it."""
        border = token + 1
        return min(max(self.start(border) + bool(self._match(border)[1]), 1), len(self._text))

    def _is_border(self, border: int) -> bool:
        """Whether no character has tokens on both sides."""
        return not self._match(border)[1].strip()

    def _match(self, border: int) -> tuple[int, str]:
        """How far the text is that of the tokens in front of a border, and what these decode to behind that."""
        if border not in self._known:
            block = self._blocks[bisect_right(self._blocks, border, key=lambda block: block.begin) - 1]
            decoded = self._decode(block.front, border)[block.front_len :]
            # Bad characters at the end may be of a cut one, also where the text has such characters itself.
            whole = decoded if border == len(self._ids) else decoded.rstrip(_BAD_CHAR)
            place, rest = _match(self._text, block.place, whole)
            self._known[border] = place, rest + decoded[len(whole) :]
        return self._known[border]

    def _begin_block(self, begin: int) -> None:
        """Begins a block, whose front is the last token or those of the last character."""
        place, _ = self._match(begin)
        for front in range(begin - 1, max(begin - _MAX_FRONT_LEN, -1), -1):
            decoded = self._decode(front, begin)
            if decoded.strip() and self._text.endswith(decoded.lstrip(), 0, place):
                break
        else:
            front = self._blocks[-1].begin
            decoded = self._decode(front, begin)
        self._blocks.append(_Block(begin, place, front, len(decoded)))

    def _decode(self, begin: int, end: int) -> str:
        if begin == end:
            return ""  # some decoders fail
        text: str = self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text


def _match(text: str, place: int, decoded: str) -> tuple[int, str]:
    """How far a text is, from a place on, what was decoded, white space aside; and what was decoded behind that."""
    if text.startswith(decoded, place):
        return place + len(decoded), ""
    rest = 0
    for i, char in enumerate(decoded):
        found = place
        while not char.isspace() and text[found : found + 1].isspace():
            found += 1
        if text[found : found + 1] == char:
            place, rest = found + 1, i + 1
        elif not char.isspace():
            break
    return place, decoded[rest:]
