"""Metrics: values worked out by hand, and the KL against the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark.quality.metrics import METRICS, score
from benchmark.quality.question import Question

from chunk_cache_tools.verify.distance import first_token_kl


@pytest.mark.parametrize(
    ("reply", "answer", "exact", "f1", "rouge", "contained"),
    [
        ("Paris", "Paris", 1, 1, 1, 1),
        ("The  Paris!", "paris", 1, 1, 2 / 3, 1),  # SQuAD drops articles and punctuation, ROUGE-L articles only not
        ("It is in Paris.", "Paris", 0, 2 / 5, 2 / 5, 1),
        ("London", "Paris", 0, 0, 0, 0),
        ("", "Paris", 0, 0, 0, 0),
        ("b c a x", "x y b c", 0, 2 * 3 / 7, 2 * 2 / 8, 0),  # the article "a" does not count in the bag of words
        ("4 0 7 1", "4 0 7 1", 1, 1, 1, 1),
        ("4 0 1 7", "4 0 7 1", 0, 1, 3 / 4, 0),  # a bag of words has no order
    ],
)
def test_metrics_of_one_answer(
    reply: str, answer: str, exact: float, f1: float, rouge: float, contained: float
) -> None:
    found = {name: metric(reply, answer) for name, metric in METRICS.items()}
    expected = {"exact_match": exact, "token_f1": f1, "rouge_l": rouge, "substring": contained}
    assert found == pytest.approx(expected)


def test_any_answer_is_right_unless_all_are_required() -> None:
    answers = ("Paris", "Rome", "Oslo")
    either = Question("", ("c",), "q", answers)
    every = Question("", ("c",), "q", answers, require_all=True)
    assert score("substring", "Rome, I think", either) == 1.0
    assert score("substring", "Rome, I think", every) == pytest.approx(1 / 3)
    assert score("substring", "rome and OSLO and Paris", every) == 1.0
    assert score("exact_match", "rome", either) == 1.0


def test_kl_of_all_tokens_is_the_textbook_sum() -> None:
    p, q = _distributions(size=5, seed=0)
    assert first_token_kl(np.log(p), np.log(q)) == pytest.approx((p * np.log(p / q)).sum())


@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_kl_of_the_top_tokens_is_a_lower_bound_that_grows(num_top: int) -> None:
    p, q = _distributions(size=200, seed=num_top)
    order = np.argsort(-p)
    whole = (p * np.log(p / q)).sum()
    fewer, more = (first_token_kl(np.log(p[order[:n]]), np.log(q[order[:n]])) for n in (num_top, 2 * num_top))
    assert 0 <= fewer <= more <= whole + 1e-9
    assert first_token_kl(np.log(p[order[:num_top]]), np.log(p[order[:num_top]])) == pytest.approx(0, abs=1e-12)


def test_kl_stays_finite_without_a_rest() -> None:
    certain = [0.0, -50.0]
    assert first_token_kl(certain, certain) == 0.0
    assert first_token_kl(certain, [-30.0, 0.0]) == pytest.approx(30.0, rel=1e-3)


def _distributions(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.dirichlet(np.full(size, 0.3)) + 1e-12, draw.dirichlet(np.full(size, 0.3)) + 1e-12
