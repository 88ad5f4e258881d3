"""Retriever: the passages that fit a question best, by TF-IDF of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.demo.corpus import Passage
from sklearn.feature_extraction.text import TfidfVectorizer


class Retriever:
    """Ranks passages by the cosine of their TF-IDF vectors (words and pairs of words) with the question's."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = tuple(passages)
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", ngram_range=(1, 2))
        self._matrix = self._vectorizer.fit_transform(passage.text for passage in passages)

    def find(self, question: str, num_passages: int) -> list[Passage]:
        """At most `num_passages` passages, best first; equal scores in the order of the corpus."""
        scores = (self._matrix @ self._vectorizer.transform([question]).T).toarray().ravel()
        best = (-scores).argsort(kind="stable")[:num_passages]
        return [self._passages[i] for i in best]
