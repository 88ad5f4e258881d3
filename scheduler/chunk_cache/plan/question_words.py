"""QuestionWords: how near tokens of a prompt's chunks stand to words of its question, for the method `near-words`.

*Ours*. What a question asks about mostly stands near the question's own words, rare ones above all, and which tokens
those are is known before any forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chunk_cache.keys import TokenIds
from chunk_cache.methods import Ranking
from chunk_cache.types import Span

REACH = 16
"""Tokens on either side of a word that it counts for, linearly less with distance (docs/quality.md)."""
_NEARNESS = REACH + 1 - np.abs(np.arange(-REACH, REACH + 1))
_SCALE = 1024
"""Rarity is multiplied by it and rounded: integers add up alike on every processor."""
_NO_WORD = 0


class QuestionWords:
    """Which token ids are the same word; each token of a longer word counts by itself.

    Args:
        texts: of each token id from 0 on; ids that differ in case or in the space around them are the same word, and
            those without a letter or digit are none. None = each id is a word of its own.
    """

    def __init__(self, texts: Iterable[str] | None = None) -> None:
        self._word_of: npt.NDArray[np.int32] | None = None
        if texts is not None:
            numbers: dict[str, int] = {}
            words = (text.strip().lower() for text in texts)
            each = [numbers.setdefault(word, len(numbers) + 1) if _is_word(word) else _NO_WORD for word in words]
            self._word_of = np.array(each, dtype=np.int32)

    @classmethod
    def of(cls, tokenizer: Any, num_ids: int) -> QuestionWords:
        """From the text of each id by a tokenizer, special tokens left out; tokenizer None = each id is a word."""
        if tokenizer is None:
            return cls(None)
        # A slow tokenizer of transformers that is asked to skip special tokens collects them anew at every call.
        skips = getattr(tokenizer, "is_fast", True)
        special = frozenset() if skips else frozenset(tokenizer.all_special_ids)
        return cls("" if token in special else _decode(tokenizer, token, skips) for token in range(num_ids))

    def rankings(self, token_ids: TokenIds, spans: Sequence[Span], question: Span) -> tuple[Ranking, ...]:
        """How near words of the question stand, for each span `[span length]`; 0 where none is within `REACH`.

        A word counts log(tokens of all spans / its occurrences in them), squared.

        Args:
            token_ids: the whole prompt, shape [prompt_len].
            spans: at least one.
        """
        words = self._words(np.asarray(token_ids))  # a copy: SGLang extends the array of a session
        asked = np.unique(words[slice(*question)])
        asked = asked[asked != _NO_WORD]
        parts = [words[slice(*span)] for span in spans]
        if not len(asked):
            return tuple(np.zeros(len(part), dtype=np.float32) for part in parts)
        together = np.concatenate(parts)
        number = np.minimum(np.searchsorted(asked, together), len(asked) - 1)
        is_asked = asked[number] == together
        times = np.bincount(number[is_asked], minlength=len(asked))
        rarity = np.rint(_SCALE * np.log(len(together) / np.maximum(times, 1)) ** 2).astype(np.int64)
        worth = np.where(is_asked, rarity[number], 0)
        cuts = np.cumsum([len(part) for part in parts])[:-1]
        around = (np.convolve(part, _NEARNESS)[REACH : len(part) + REACH] for part in np.split(worth, cuts))
        return tuple(part.astype(np.float32) for part in around)

    def _words(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.integer[Any]]:
        if self._word_of is None:
            return ids + 1  # 0 is no word
        is_known = (ids >= 0) & (ids < len(self._word_of))  # the tokens of an image are not
        return np.where(is_known, self._word_of[np.where(is_known, ids, 0)], _NO_WORD)


def _decode(tokenizer: Any, token: int, skips_special: bool) -> str:
    try:
        return str(tokenizer.decode([token], skip_special_tokens=skips_special))
    except Exception:  # noqa: BLE001 - what a tokenizer cannot read, whatever it says of it, is no word
        return ""


def _is_word(text: str) -> bool:
    return any(map(str.isalnum, text))
