"""The lab: chosen rows over a cache that one may change, against transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.rows import KV, RowModel
from benchmark.quality.prompts import Prompt

TRAINED = "benchmark/quality/models/qa-1m-seed0"


@pytest.fixture(scope="module")
def model() -> RowModel:
    return RowModel(TRAINED)


@pytest.fixture(scope="module")
def case(model: RowModel) -> Case:
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha())[:40]
    chunks = tuple(" ".join(words[i : i + 8]) + " " for i in range(0, 32, 8))
    prompt = Prompt(" ".join(words[:4]) + " ", chunks, " ".join(words[-4:]) + " ", words[5])
    return Case.build(model, prompt, own_len=4)


def test_all_rows_are_the_forward_of_transformers(model: RowModel, case: Case) -> None:
    cache = KV.empty(model, case.prompt_len)
    hidden = model.run(cache, case.ids, torch.arange(case.prompt_len))
    expected = model._model(case.ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(model.log_probs(hidden), expected, atol=1e-4, rtol=1e-4)


def test_rows_may_be_computed_in_any_cut(model: RowModel, case: Case) -> None:
    cache, positions = KV.empty(model, case.prompt_len), torch.arange(case.prompt_len)
    parts = [model.run(cache, case.ids[part], part) for part in positions.split(7)]
    whole = model.run(KV.empty(model, case.prompt_len), case.ids, positions)
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_everything_computed_loses_nothing(case: Case) -> None:
    judged = case.judge(torch.arange(case.head_len, case.tail_start))
    assert judged.recomputed == 1
    assert max(abs(judged.gold_loss), abs(judged.own_loss), abs(judged.first_kl), abs(judged.own_kl)) < 1e-4


def test_the_first_chunk_is_exact_and_the_others_are_not(case: Case) -> None:
    difference = (case.full.k - case.reused.k).abs().amax((0, 2, 3))
    (start, end), (_, last) = case.spans[0], case.spans[-1]
    assert difference[:end].max() < 1e-4
    assert difference[start + (end - start) : last].max() > 1e-2
    assert case.judge(torch.arange(0)).own_kl > 1e-4


def test_keys_that_are_turned_are_keys_computed_there(model: RowModel, case: Case) -> None:
    ids, by = case.ids[:8], 17
    here, there = KV.empty(model, 8), KV.empty(model, 8 + by)
    model.run(here, ids, torch.arange(8))
    unseen = torch.zeros(8, 8 + by)
    unseen[:, :by] = float("-inf")
    model.run(there, ids, torch.arange(by, 8 + by), bias=unseen)
    torch.testing.assert_close(there.k[:, by:], model.turn(here.k, by), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(there.v[:, by:], here.v, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.turn(model.turn(here.k, by), -by), here.k, atol=1e-4, rtol=1e-4)


def test_attention_of_the_question_sums_to_its_rows(case: Case) -> None:
    mass = case.question_attention()
    torch.testing.assert_close(mass.sum(-1), torch.full(mass.shape[:2], float(case.prompt_len - case.tail_start)))


def test_attribution_is_the_slope_of_the_loss(case: Case) -> None:
    """Moving reused K and V a little towards the true ones changes the own answer's loss as the gradient says."""
    step = 1e-2
    moved = case.reused.clone()
    chunks = slice(case.head_len, case.tail_start)
    moved.k[:, chunks] += step * (case.full.k - case.reused.k)[:, chunks]
    moved.v[:, chunks] += step * (case.full.v - case.reused.v)[:, chunks]
    none = torch.arange(0)
    gain = case.judge(none).own_loss - case.judge(none, cache=moved).own_loss
    expected = float(case.attribution().sum()) * step
    assert gain == pytest.approx(expected, rel=0.2, abs=1e-4)
