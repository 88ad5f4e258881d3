"""Metrics: how right one reply is, from 0 to 1: `score(metric, reply, question)` for each of `METRICS`.

Exact match and token F1 are those of SQuAD (Rajpurkar et al. 2016, section 6.1), written here in ten lines:
torchmetrics takes 20 s to import, and evaluate needs a download. ROUGE-L is that of the package rouge-score.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, lru_cache

from benchmark.quality.question import Question
from rouge_score.rouge_scorer import RougeScorer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(reply: str, answer: str) -> float:
    """1 if both have the same words in the same order."""
    return float(_words(reply) == _words(answer))


def token_f1(reply: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words, as a bag; 1 if both are empty."""
    words, wanted = _words(reply), _words(answer)
    if not words or not wanted:
        return float(words == wanted)
    num_common = (Counter(words) & Counter(wanted)).total()
    return 2 * num_common / (len(words) + len(wanted))


def rouge_l(reply: str, answer: str) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004), without stemming."""
    return float(_rouge().score(answer, reply)["rougeL"].fmeasure)


def substring(reply: str, answer: str) -> float:
    """1 if the reply contains the answer; case and the amount of white space do not count."""
    return float(" ".join(answer.casefold().split()) in " ".join(reply.casefold().split()))


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
    "substring": substring,
}
RIGHT_OR_WRONG = frozenset({"exact_match", "substring"})
"""Metrics that are 1 (right) or 0 (wrong); the others are matters of degree."""


def score(metric: str, reply: str, question: Question) -> float:
    """The best score over the answers, or their mean if all are required. Range [0, 1]."""
    return _score(metric, reply, question.answers, question.require_all)


@lru_cache(maxsize=100_000)  # one reply to a question comes back under many methods and ratios
def _score(metric: str, reply: str, answers: tuple[str, ...], require_all: bool) -> float:
    values = [METRICS[metric](reply, answer) for answer in answers]
    return sum(values) / len(values) if require_all else max(values)


@lru_cache(maxsize=10_000)
def _words(text: str) -> tuple[str, ...]:
    return tuple(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@cache
def _rouge() -> RougeScorer:
    return RougeScorer(["rougeL"], use_stemmer=False)
