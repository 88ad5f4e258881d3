"""Alignment: maps the tokens of one tokenizer to those of another, by the characters that they share.

Verbs: `decode` (ids -> text and where each token lies in it), `best_of_overlap` (values of tokens -> values of the
other tokenizer's tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text.

    Attributes:
        text: the text.
        starts, ends: `[num_tokens]` characters, half-open, neither ever decreasing; a token has at least one.
    """

    text: str
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)


def tokens_of(text: str, offsets: Sequence[Sequence[int]]) -> Tokens:
    """Tokens at `offsets`; bytes of one character may be several tokens, and a token may have no character of its own.

    Args:
        offsets: (start, end) of each token, as a fast tokenizer gives them.
    """
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    starts = np.maximum.accumulate(pairs[:, 0]) if len(pairs) else pairs[:, 0]
    ends = np.maximum.accumulate(np.maximum(pairs[:, 1], starts + 1)) if len(pairs) else pairs[:, 1]
    return Tokens(text, starts, ends)


def decode(tokenizer: Any, ids: Sequence[int]) -> Tokens:
    """The text of ids of a client's prompt, and where each id lies in it.

    If the tokenizer would split this text into other ids, as it may for ids that were made in another way, the text is
    divided among the tokens in proportion to the length of what each decodes to alone.

    Raises:
        ValueError: the tokenizer has no text for an id, so it is not the tokenizer of these ids.
    """
    ids = list(ids)
    if ids and max(ids) >= len(tokenizer):
        raise ValueError(f"id {max(ids)} is not one of the {len(tokenizer)} of the main model's tokenizer")
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] == ids:
        return tokens_of(text, encoded["offset_mapping"])
    lens = np.array([max(1, len(tokenizer.decode([one], skip_special_tokens=False))) for one in ids], dtype=np.float64)
    bounds = np.round(np.cumsum([0.0, *lens]) * (len(text) / lens.sum())).astype(np.int64)
    return tokens_of(text, np.stack([bounds[:-1], bounds[1:]], axis=1).tolist())


def best_of_overlap(values: npt.NDArray[np.float32], source: Tokens, target: Tokens) -> npt.NDArray[np.float32]:
    """Per target token the largest value of the source tokens that it shares a character with: so a selected source
    token selects all target tokens that it overlaps.

    A target token between two source tokens takes the value of the one behind it.

    Args:
        values: `[len(source)]`.

    Returns:
        `[len(target)]`.
    """
    if not len(source):
        return np.zeros(len(target), dtype=np.float32)
    first = np.minimum(np.searchsorted(source.ends, target.starts, side="right"), len(source) - 1)
    last = np.maximum(np.searchsorted(source.starts, target.ends, side="left"), first + 1)
    bounds = np.stack([first, last], axis=1).ravel()
    padded = np.append(values, np.float32(-np.inf))
    return np.maximum.reduceat(padded, bounds)[::2] if len(target) else values[:0]
