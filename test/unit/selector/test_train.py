"""Fine-tuning: a gain on questions that were not trained on, and input that cannot be used."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from chunk_cache_tools.train_selector.train_selector_command import (
    PROG,
    Prompt,
    Score,
    kl_divergence,
    load,
    main,
    make_examples,
    measure,
    parse_args,
    predict,
    read_prompts,
    train,
)
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel

NAMES = ("anna", "tom", "mary", "paul", "lisa", "john")
THINGS = ("tower", "cat", "letter", "river", "house")


def line(rng: random.Random) -> str:
    chunks = [
        " ".join(f"the {rng.choice(THINGS)} of {name} is {rng.randrange(100)}." for name in rng.sample(NAMES, 3)) + " "
        for _ in range(3)
    ]
    question = f"what is the {rng.choice(THINGS)} of {rng.choice(NAMES)}?"
    return json.dumps({"system": "read this. ", "chunks": chunks, "question": question, "answers": ["?"]})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(7)
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("\n".join(line(rng) for _ in range(24)) + "\n\n")
    return path


def flags(main_dir: Path, auxiliary_dir: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--model", str(main_dir), "--selector", str(auxiliary_dir)),
        *("--data", str(data), "--out", str(out), *more),
    ]


def test_a_few_steps_gain_on_held_out_questions(
    main_dir: Path, auxiliary_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trained"
    more = ("--steps", "16", "--batch", "2", "--learning-rate", "0.003")
    args = parse_args(flags(main_dir, auxiliary_dir, data, out, *more))
    before, after = train(args)
    assert after.kl.mean() < 0.9 * before.kl.mean()
    told = capsys.readouterr().out
    assert "trained on 19 questions, 16 steps; on 5 others:" in told
    assert f"gain:   {after.gain_over(before)}; written: {out}" in told
    # What was written is what was measured, but for the rounding of its weights.
    prompts = read_prompts(data)
    random.Random(0).shuffle(prompts)
    trained = AuxiliaryModel.load(str(out))
    held_out = list(make_examples(prompts[:5], load(str(main_dir), "--model", "cpu"), trained))
    assert measure(trained, held_out).kl.mean() == pytest.approx(after.kl.mean(), rel=0.05)


def test_a_model_is_its_own_best_pupil(main_dir: Path, data: Path) -> None:
    """With one chunk both read the same text, so nothing is left to learn."""
    model = load(str(main_dir), "--model", "cpu")
    prompts = [type(p)(p.system, p.chunks[:1], p.question) for p in read_prompts(data)[:3]]
    for example in make_examples(prompts, model, model):
        predicted = predict(model, example).detach()
        np.testing.assert_allclose(predicted.numpy(), example.target.numpy(), atol=1e-6)
        assert float(kl_divergence(example.target, predicted)) == pytest.approx(0.0, abs=1e-5)
    score = measure(model, list(make_examples(prompts, model, model)))
    assert score.kl == pytest.approx(0.0, abs=1e-5)
    assert (score.jaccard == 1.0).all()


def test_the_gain_is_taken_question_by_question() -> None:
    """Questions differ by far more than what was gained on each of them."""
    before = Score(np.array([1.0, 5.0, 9.0, 2.0]), np.array([0.2, 0.4, 0.1, 0.3]))
    after = Score(before.kl - [0.5, 0.6, 0.4, 0.5], before.jaccard)
    found = re.fullmatch(
        r"KL \+0\.5000 \[(.+), (.+)\] nats, Jaccard \+0\.0000 \[0\.0000, 0\.0000\]", after.gain_over(before)
    )
    assert found
    low, high = map(float, found.groups())
    assert 0.2 < low < 0.5 < high < 0.8


def test_the_loss_is_the_divergence() -> None:
    target, predicted = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert float(kl_divergence(target, predicted)) == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 prompts; give at least two"),
        ("{\n{", ":1: not JSON"),
        ("[1]", ":1: not an object"),
        ('{"chunks": ["a"], "question": "b", "system": 3}', ":1: system: not a text"),
        ('{"chunks": [], "question": "b"}', ":1: chunks: not a list of texts"),
        ('{"chunks": ["", " "], "question": "b"}', ":1: chunks: not a list of texts"),
        ('{"chunks": ["\u200b"], "question": "b"}', ":1: chunks: not a list of texts"),
        ('{"chunks": ["\\ud800"], "question": "b"}', ":1: half of a surrogate pair"),
        ("[" * 10**5 + "]" * 10**5, ":1: objects or lists are nested too deep"),
        ('{"chunks": ["a"]}', ":1: question: not a text"),
    ],
)
def test_bad_data_names_the_line(
    text: str, message: str, tmp_path: Path, main_dir: Path, auxiliary_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert main(flags(main_dir, auxiliary_dir, path, tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert told.removeprefix(f"{PROG}: ").removeprefix("--data: ").startswith(str(path))
    assert message in told


def test_null_is_not_given_and_blank_passages_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    line = '{"system": null, "chunks": ["a\u2028b\u0085c", " "], "question": "q"}'
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert read_prompts(path) == [Prompt("", ("a\u2028b\u0085c",), "q")] * 2
    assert f"{path}:2: chunks[1] is not used (no visible text)" in capsys.readouterr().err


def test_other_bad_input_names_the_flag(
    main_dir: Path, auxiliary_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(main_dir, tmp_path, data, tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith(f"{PROG}: --selector: '{tmp_path}' is neither a Hugging Face folder")
    assert main(flags(main_dir, auxiliary_dir, tmp_path / "none", tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith(f"{PROG}: {tmp_path / 'none'}: cannot be read")
    for more, message in [
        (("--steps", "0"), "--steps: 0; give at least 1"),
        (("--held-out", "1"), "--held-out: 1 is not between 0 and 1"),
        (("--learning-rate", "0"), "--learning-rate: 0 is not between 0 and 1"),
        (("--device", "tpu9"), "--device: 'tpu9' cannot be used"),
        (("--out", str(data)), f"--out: {data} is there already"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main([*flags(main_dir, auxiliary_dir, data, tmp_path / "out"), *more])
        assert message in capsys.readouterr().err
