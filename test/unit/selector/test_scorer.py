"""AuxiliaryModel and ChunkScorer, against the attention that transformers itself gives out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_chunk_cache.selector import auxiliary as auxiliary_module
from sglang_chunk_cache.selector import chunk_scorer as scorer_module
from sglang_chunk_cache.selector.alignment import best_of_overlap, tokens_of
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel, SelectorModelError, check_selector_model
from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer, ReadChunk, TooLong
from tiny_models import make_model
from unit.selector.conftest import TEXT, other_tokenizer

SYSTEM, QUESTION = "Read. ", "What was built in 1889?"
CHUNKS = [TEXT, TEXT[20:60], TEXT[5:]]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is not rounded, and long texts are read in many steps."""
    monkeypatch.setattr(auxiliary_module, "STORED", torch.float32)
    monkeypatch.setattr(scorer_module, "STEP_LEN", 7)


@pytest.fixture(scope="module")
def model(auxiliary_dir: Path) -> AuxiliaryModel:
    return AuxiliaryModel.load(str(auxiliary_dir))


@pytest.fixture
def scorer(model: AuxiliaryModel, main_dir: Path) -> ChunkScorer:
    return ChunkScorer(model, AutoTokenizer.from_pretrained(main_dir), 10**9)


def main_ids(main_dir: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(main_dir).encode(text, add_special_tokens=False)


def run(reading: Iterator[ReadChunk | None]) -> ReadChunk:
    *steps, chunk = reading
    assert set(steps) <= {None}
    assert chunk is not None
    return chunk


def prepared(scorer: ChunkScorer, main_dir: Path, text: str, system: str = SYSTEM) -> ReadChunk:
    prefix = system.encode()
    return run(scorer.prepare(prefix + text.encode(), main_ids(main_dir, text), prefix, main_ids(main_dir, system)))


def eager_attention(folder: Path, sink: list[int], chunk: list[int], question: list[int]) -> np.ndarray:
    """Mean over heads and the question's rows of the last layer's weights, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([sink + chunk + question])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[-1][0]
    return weights[:, len(sink) + len(chunk) :, len(sink) : len(sink) + len(chunk)].mean(dim=(0, 1)).numpy()


@pytest.mark.parametrize("system", [SYSTEM, ""])
def test_scores_are_the_last_layers_attention(
    scorer: ChunkScorer, model: AuxiliaryModel, main_dir: Path, auxiliary_dir: Path, system: str
) -> None:
    chunks = [prepared(scorer, main_dir, text, system) for text in CHUNKS]
    found = scorer.score(main_ids(main_dir, QUESTION), chunks)
    own = model.tokenizer
    for text, chunk, scores in zip(CHUNKS, chunks, found, strict=True):
        encoded = own(text, return_offsets_mapping=True)
        weights = eager_attention(
            auxiliary_dir, model.sink_of(system), encoded["input_ids"], own(QUESTION)["input_ids"]
        )
        expected = best_of_overlap(weights, tokens_of(text, encoded["offset_mapping"]), chunk.main)
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        assert len(scores) == len(main_ids(main_dir, text))


def test_a_model_without_a_sink_reads_chunks_alone(model: AuxiliaryModel, main_dir: Path) -> None:
    bare = AuxiliaryModel(model.model, other_tokenizer(380))
    assert bare.sink_of("") == []
    alone = ChunkScorer(bare, AutoTokenizer.from_pretrained(main_dir), 10**9)
    chunk = prepared(alone, main_dir, TEXT, "")
    (found,) = alone.score(main_ids(main_dir, QUESTION), [chunk])
    assert np.isfinite(found).all()
    assert len(found) == len(main_ids(main_dir, TEXT))


def test_within_one_text_they_are_the_same_and_have_a_gradient(model: AuxiliaryModel, auxiliary_dir: Path) -> None:
    sink, chunk, question = (model.tokenizer(text)["input_ids"] for text in (SYSTEM, TEXT, QUESTION))
    columns = (len(sink), len(sink) + len(chunk))
    scores = model.attend_within(sink + chunk + question, columns, len(question))
    expected = eager_attention(auxiliary_dir, sink, chunk, question)
    np.testing.assert_allclose(scores.detach().numpy(), expected, atol=1e-6)
    scores.log().sum().backward()
    gradient = model.model.layers[-1].self_attn.q_proj.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    model.model.zero_grad()


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(
    model: AuxiliaryModel, main_dir: Path, scorer: ChunkScorer
) -> None:
    sizes = [prepared(scorer, main_dir, text).num_bytes for text in CHUNKS]
    prefix = scorer.num_bytes - sum(sizes)
    small = ChunkScorer(model, AutoTokenizer.from_pretrained(main_dir), prefix + sizes[0] + sizes[2])
    keys = [SYSTEM.encode() + text.encode() for text in CHUNKS]
    prepared(small, main_dir, CHUNKS[0])
    prepared(small, main_dir, CHUNKS[1])
    assert small.find(keys[0]) is not None  # the second is the oldest now
    prepared(small, main_dir, CHUNKS[2])
    assert [small.find(key) is not None for key in keys] == [True, False, True]
    assert small.num_bytes <= prefix + sizes[0] + sizes[2]


def test_a_system_prompt_is_kept_as_long_as_a_chunk_that_holds_it(main_dir: Path, scorer: ChunkScorer) -> None:
    for number in range(4):
        key, ids, prefix_ids = bytes([number]), main_ids(main_dir, "Rome."), main_ids(main_dir, f"{number} {TEXT}")
        *_, chunk = scorer.prepare(key + b"chunk", ids, key, prefix_ids)
        assert chunk is not None
        if number == 0:
            scorer._max_bytes = 2 * scorer.num_bytes + chunk.num_bytes
        assert scorer.find(key + b"chunk") is chunk
        held = {id(read): read for kept in scorer._kept.values() for read in getattr(kept, "past", (kept,))}
        assert sum(read.num_bytes for read in held.values()) == scorer.num_bytes <= scorer._max_bytes


def test_a_text_that_is_too_long_says_so(scorer: ChunkScorer, model: AuxiliaryModel, main_dir: Path) -> None:
    chunk = prepared(scorer, main_dir, TEXT)
    length = sum(text.num_tokens for text in chunk.past)
    scorer._model = AuxiliaryModel(model.model, model.tokenizer)
    scorer._model.max_len = length
    with pytest.raises(TooLong, match=f"the selector's model has {length} positions"):
        scorer.score(main_ids(main_dir, QUESTION), [chunk])
    with pytest.raises(TooLong):
        prepared(scorer, main_dir, TEXT + TEXT)


def test_special_tokens_of_the_main_model_are_not_the_question(
    scorer: ChunkScorer, model: AuxiliaryModel, main_dir: Path
) -> None:
    chunk = prepared(scorer, main_dir, TEXT)
    tokenizer = AutoTokenizer.from_pretrained(main_dir)
    plain, marked = (
        tokenizer.encode(text, add_special_tokens=False) for text in (QUESTION, f"{QUESTION}<|assistant|>")
    )
    assert plain != marked
    np.testing.assert_array_equal(scorer.score(plain, [chunk])[0], scorer.score(marked, [chunk])[0])


# Models that cannot select.


def test_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(SelectorModelError, match="is neither a Hugging Face folder nor a name with"):
        check_selector_model(str(tmp_path))


def test_a_tokenizer_of_another_model(auxiliary_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(auxiliary_dir, tmp_path / "wrong")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    other = make_model("llama", tmp_path / "big", vocab=512)
    AutoTokenizer.from_pretrained(other).save_pretrained(folder)
    with pytest.raises(SelectorModelError, match=r"has 51[0-9] tokens and its model 400: they do not belong together"):
        AuxiliaryModel.load(str(folder))


def test_weights_that_cannot_be_read(auxiliary_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(auxiliary_dir, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no weights")
    check_selector_model(str(folder))
    with pytest.raises(SelectorModelError, match="its weights cannot be loaded"):
        AuxiliaryModel.load(str(folder))


def test_a_model_that_is_no_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    other_tokenizer(300).save_pretrained(tmp_path)
    with pytest.raises(SelectorModelError, match="is not a text model"):
        check_selector_model(str(tmp_path))
