"""Which tokens stand near words of the question, against a slow definition."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.plan.question_words import REACH, QuestionWords

TEXTS = [" the", "The", " rose", "ROSE", ".", "\n", " 42", "a", " stone", "x", "y", "z"]
CLASSES = ["the", "the", "rose", "rose", None, None, "42", "a", "stone", "x", "y", "z"]


@given(st.lists(st.integers(0, len(TEXTS) + 1), min_size=3, max_size=90), st.integers(1, 30), st.integers(0, 40))
def test_a_token_counts_what_stands_around_it(ids: list[int], question_len: int, first_len: int) -> None:
    end = max(2, len(ids) - question_len)
    middle = min(max(1, first_len), end - 1)
    spans = [(0, middle), (middle, end)]
    classes = [*CLASSES, None, None]
    words = [classes[one] for one in ids]
    asked = {word for word in words[end:] if word is not None}

    def worth(at: int) -> int:
        word = words[at]
        return round(1024 * math.log(end / words[:end].count(word)) ** 2) if word in asked else 0

    found = QuestionWords(TEXTS).rankings(ids, spans, (end, len(ids)))
    for (start, stop), ranking in zip(spans, found, strict=True):
        slow = [
            sum(worth(at) * max(0, REACH + 1 - abs(at - p)) for at in range(start, stop)) for p in range(start, stop)
        ]
        np.testing.assert_array_equal(ranking, np.array(slow, dtype=np.float32))


def test_without_texts_an_id_is_a_word() -> None:
    ids = [7, 7, 3, 10**9, 5, 3, 10**9]
    (ranking,) = QuestionWords().rankings(ids, [(0, 5)], (5, 7))
    assert ranking.argmax() in (2, 3)
    assert ranking.all()  # all are near
    (nothing,) = QuestionWords().rankings(ids, [(0, 5)], (6, 6))
    assert not nothing.any()
    assert nothing.shape == (5,)


def test_tokens_of_an_image_are_no_words() -> None:
    (ranking,) = QuestionWords(TEXTS).rankings([10**12, -1, 6, 10**12, 6], [(0, 3)], (3, 5))
    np.testing.assert_array_equal(ranking > 0, [True] * 3)
    assert ranking[2] == ranking.max()


class Odd:
    """A tokenizer that cannot read one of its numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        if ids == [1]:
            raise RuntimeError("no such token")
        return {0: " Rose", 2: "", 3: "rose"}[ids[0]]


def test_of_a_tokenizer_what_it_cannot_read_is_no_word() -> None:
    words = QuestionWords.of(Odd(), 4)
    (ranking,) = words.rankings([1, 2, 0, 1, 2, 3], [(0, 3)], (3, 6))
    assert ranking.argmax() == 2
    (nothing,) = words.rankings([1, 2, 0, 1, 2], [(0, 3)], (3, 5))
    assert not nothing.any()
    (each,) = QuestionWords.of(None, 4).rankings([5, 6, 5], [(0, 2)], (2, 3))
    assert each.argmax() == 0


class Slow:
    """A slow tokenizer of transformers: skipping special tokens takes it long at each call."""

    is_fast = False
    all_special_ids = (1,)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return ["rose", "rose", "stone"][ids[0]]


def test_of_a_slow_tokenizer_special_tokens_are_read_once() -> None:
    (ranking,) = QuestionWords.of(Slow(), 3).rankings([2, 1, 0], [(0, 2)], (2, 3))
    assert not ranking.any()
    (ranking,) = QuestionWords.of(Slow(), 3).rankings([2, 0, 0], [(0, 2)], (2, 3))
    assert ranking.argmax() == 1
