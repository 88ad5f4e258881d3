"""The lab: chosen rows over a cache that one may change, against transformers' own forward."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmark.quality.lab import storing
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import RULES, Reused
from benchmark.quality.lab.rows import KV, RowModel
from benchmark.quality.lab.storing import Stored
from benchmark.quality.prompts import Prompt
from benchmark.quality.question import write_questions
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

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


def test_rules_take_the_tokens_of_the_budget_and_never_of_the_first_chunk(case: Case) -> None:
    reused = Reused(case, tails=[case.ids[:3]])
    for name, rule in RULES.items():
        if name == "nothing":
            continue
        rows = rule(reused, 0.3).rows.tolist()
        assert rows == sorted(set(rows)), name
        assert case.spans[1][0] <= rows[0] <= rows[-1] < case.tail_start, name
        assert len(rows) == reused.num_rows(0.3) or name.startswith("epic"), name


def test_drift_of_rows_that_are_all_but_one_token_puts_it_nearly_right(case: Case) -> None:
    """What the others change by on the mean is no worse than nothing for the one that is left."""
    reused = Reused(case)
    left = reused.spans[-1][0]
    rows = torch.tensor([p for p in range(reused.start, reused.end) if p != left])
    corrected = case.judge(**reused.with_drift(rows, strength=1.0))
    assert corrected.recomputed < 1
    assert corrected.own_kl < case.judge(torch.arange(0)).own_kl


def test_a_store_behind_nothing_is_that_of_each_passage_alone(case: Case) -> None:
    stored = Stored(case)
    stored.add([torch.tensor([], dtype=torch.int64)])
    (first, _), chunks = case.spans[1], slice(case.head_len, case.tail_start)
    torch.testing.assert_close(stored.mean().reused.v[:, first : chunks.stop], case.reused.v[:, first : chunks.stop])
    torch.testing.assert_close(stored.mean().reused.k[:, chunks], case.reused.k[:, chunks], atol=1e-4, rtol=1e-4)


def test_a_store_is_the_mean_of_what_its_contexts_give(case: Case) -> None:
    contexts = [case.ids[case.tail_start : case.tail_start + 3], case.ids[:5]]
    each, both = [], Stored(case)
    for context in contexts:
        one = Stored(case)
        one.add([context])
        both.add([context])
        each.append(one.mean().reused)
    torch.testing.assert_close(both.mean().reused.k, (each[0].k + each[1].k) / 2, atol=1e-5, rtol=1e-5)
    assert float((each[0].v - each[1].v).abs().max()) > 1e-3


def test_storing_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "questions.jsonl"
    write_questions(data, make_questions("carry", num=6, seed=HELD_OUT_SEEDS[0]))
    args = [TRAINED, "--data", str(data), "--held-out", "2", "--foreign", "1", "2", "--out", str(tmp_path)]
    args += ["--name", "tiny", "--rules", *RULES, "--pair", "filler x1", "epic 0.15", "alone", "epic 0.15"]
    assert storing.main([*args, "--num", "2", "--part", "2/2"]) == 0
    assert not (tmp_path / "tiny.md").exists()
    assert storing.main([*args, "--num", "4"]) == 0
    assert capsys.readouterr().out.count("minutes left") == 4
    page = (tmp_path / "tiny.md").read_text()
    assert "4 questions of questions.jsonl" in page
    assert page.count("| stored | recomputed | KL along own answer |") == 3, "all, the last lines and the others"
    assert page.count("| filler x1 | epic 0.15 | alone | epic 0.15 |") == 1
    assert page.count("| stored | recomputed | questions.jsonl (4) |") == 1
    assert "| filler x1 | question-drift, a quarter of the layers 0.15 |" in page
    assert storing.main([*args, "--data", str(tmp_path / "none.jsonl")]) == 1


def test_conditions_side_by_side_are_those_one_by_one(case: Case) -> None:
    reused = Reused(case, tails=[case.ids[:3]])
    picks = [rule(reused, ratio) for rule in RULES.values() for ratio in (0.1, 0.3)]
    for pick, found in zip(picks, reused.judge(picks), strict=True):
        assert asdict(found) == pytest.approx(asdict(case.judge(**reused.arguments(pick))), abs=2e-4)


def test_words_of_the_question_weigh_by_their_rarity_and_reach_their_neighbours(model: RowModel) -> None:
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha())[:30]
    rare, common = words[20], words[21]
    chunks = tuple(" ".join([*words[i : i + 8], common, *words[i : i + 4]]) + " " for i in (0, 8))
    prompt = Prompt(words[25] + " ", (*chunks, " ".join([rare, *words[22:25]]) + " "), f"{rare} {common} ", words[5])
    case = Case.build(model, prompt, own_len=1)
    reused = Reused(case, first=0)
    weights = reused.word_weights
    at = [i for i in range(reused.start, reused.end) if case.ids[i] in case.ids[reused.end :]]
    assert int(weights[reused.start : reused.end].argmax()) + reused.start == at[-1], "the rare one"
    assert 0 < weights[at[0] + 1] < weights[at[0]]


def test_gemma_with_its_windows_and_two_rotations_is_that_of_transformers(model: RowModel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(model.tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    gemma, ids, positions = RowModel(str(tmp_path)), torch.arange(5, 29), torch.arange(24)
    parts = KV.empty(gemma, 24)
    hidden = torch.cat([gemma.run(parts, ids[part], part) for part in positions.split(7)])
    expected = gemma._model(ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(gemma.log_probs(hidden), expected, atol=1e-4, rtol=1e-4)
    turned = gemma.turn(gemma.turn(parts.k, 9), -9)
    torch.testing.assert_close(turned, parts.k, atol=1e-5, rtol=1e-5)
