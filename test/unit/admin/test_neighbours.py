"""Neighbours of the chunks of a corpus: who is found, in which order, and what is said where that cannot be."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.plan import neighbours
from chunk_cache.plan.neighbours import find_neighbours
from tiny_models import make_model

TEXTS = [
    "Paris is the capital of France.",
    "Rome is the capital of Italy.",
    "Water boils at 100 degrees.",
    "Steam is hot water, says Rome.",
    "Paris is the capital of France.",
    "!",
]


def test_the_most_similar_come_first_and_equal_texts_are_one() -> None:
    found = find_neighbours(TEXTS, 2)
    assert found == [(1, 3), (0, 3), (3,), (1, 2), (1, 3), ()]
    assert [place for places in find_neighbours(TEXTS, 32) for place in places].count(4) == 0


def test_blocks_of_rows_find_what_a_sort_of_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_ROWS", 7)
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefghijklmnopq", k=12)) for _ in range(60)]
    vectors = neighbours._tfidf(texts, "retriever").toarray()
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -1.0)
    for places, row in zip(find_neighbours(texts, 5), scores, strict=True):
        assert row[list(places)] == pytest.approx(np.sort(row)[::-1][:5])


def test_texts_without_words_have_no_neighbours() -> None:
    assert find_neighbours(["!", "?", "!"], 3) == [(), (), ()]


@pytest.mark.parametrize(
    ("module", "retriever", "words"),
    [
        ("sklearn.feature_extraction.text", "tfidf", ["`pip install scikit-learn`"]),
        ("sentence_transformers", "some/model", ["'some/model'", "`pip install sentence-transformers`"]),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, module: str, retriever: str, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ChunkCacheRequestError, match=r"^--retriever: .*is not installed; run `pip install") as raised:
        find_neighbours(TEXTS, 2, retriever, path="--retriever")
    assert all(word in str(raised.value) for word in words)


def test_a_model_in_a_folder_embeds_the_chunks(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    model = make_model("llama", tmp_path / "model")
    found = find_neighbours(TEXTS, 3, str(model))
    vectors = SentenceTransformer(str(model)).encode(TEXTS[:4] + TEXTS[5:], normalize_embeddings=True)
    best = int(np.argmax((vectors @ vectors.T - 2 * np.eye(5))[0]))
    assert found[0][0] == [0, 1, 2, 3, 5][best]
    assert found[0] == found[4]
    with pytest.raises(ChunkCacheRequestError, match=r"^retriever: .*cannot be used"):
        find_neighbours(TEXTS, 3, str(tmp_path / "none"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = None  # as many language models have none
    tokenizer.save_pretrained(model)
    with pytest.raises(ChunkCacheRequestError, match=r"^retriever: .*cannot be used \(.*padding"):
        find_neighbours(TEXTS, 3, str(model))
