"""Neighbours: the most similar other chunks of each chunk of a corpus (FusionRAG section 3.1; 5.3.2 recommends ten).

Verb: `find_neighbours`. Similarity is the cosine of TF-IDF vectors (scikit-learn), or of the embeddings of a
sentence-transformers model. Promises: equal texts are one chunk and have equal neighbours; a chunk that has nothing in
common with another is no neighbour of it; equal inputs give equal neighbours. Both libraries are imported when they
are asked for. Nothing here imports SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from chunk_cache.errors import one_line, request_error, show
from chunk_cache.options.warming_limits import DEFAULT_RETRIEVER

_ROWS = 512
"""Chunks that are compared with all others at a time: scores are computed in blocks of so many rows of float32."""


def find_neighbours(
    texts: Sequence[str], num: int, retriever: str = DEFAULT_RETRIEVER, path: str = "retriever"
) -> list[tuple[int, ...]]:
    """For each text, the places of up to `num` others, most similar first; of equally similar ones the earlier first.

    Args:
        texts: chunks, or their token ids as words.
        retriever: `tfidf`, or the name or folder of a sentence-transformers model.
        path: where the retriever was named, for messages.

    Raises:
        ChunkCacheRequestError: the retriever's library is not installed, or the model cannot be used.
    """
    first_places: dict[str, int] = {}
    for place, text in enumerate(texts):
        first_places.setdefault(text, place)
    distinct, places = list(first_places), list(first_places.values())
    vectors = _tfidf(distinct, path) if retriever == DEFAULT_RETRIEVER else _embeddings(distinct, retriever, path)
    nearest = {
        text: tuple(places[i] for i in best) for text, best in zip(distinct, _nearest(vectors, num), strict=True)
    }
    return [nearest[text] for text in texts]


def _nearest(vectors: Any, num: int) -> Iterator[list[int]]:
    """The most similar other rows of each row of normalized vectors, by blocks of rows."""
    for first in range(0, vectors.shape[0], _ROWS):
        scores = vectors[first : first + _ROWS] @ vectors.T
        scores = np.asarray(scores if isinstance(scores, np.ndarray) else scores.toarray(), dtype=np.float32)
        for i, row in enumerate(scores):
            row[first + i] = 0.0
            candidates = np.flatnonzero(row > 0.0)
            if len(candidates) > num:
                least = np.partition(row[candidates], -num)[-num]
                candidates = candidates[row[candidates] >= least]
            yield candidates[np.argsort(-row[candidates], kind="stable")][:num].tolist()


def _tfidf(texts: Sequence[str], path: str) -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise request_error(
            path, "scikit-learn is not installed", "run `pip install scikit-learn`, or name a model"
        ) from None
    try:
        return TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\w+", dtype=np.float32).fit_transform(texts)
    except ValueError:  # not a single word
        return np.zeros((len(texts), 1), dtype=np.float32)


def _embeddings(texts: Sequence[str], model: str, path: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise request_error(
            path,
            f"{show(model)} needs sentence-transformers, which is not installed",
            f"run `pip install sentence-transformers`, or name {DEFAULT_RETRIEVER}",
        ) from None
    try:
        # A model that is no encoder, such as one without a pad token, loads, and then cannot embed several texts.
        vectors = SentenceTransformer(model).encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
    except (OSError, ValueError) as error:
        problem = f"{show(model)} cannot be used ({one_line(error)[:200]})"
        remedy = f"name {DEFAULT_RETRIEVER}, or a sentence-transformers model or its folder"
        raise request_error(path, problem, remedy) from None
    return np.asarray(vectors, dtype=np.float32)
