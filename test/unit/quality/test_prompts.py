"""Prompts: the marked text, its priming, chat templates, formats from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.quality.prompts import PLAIN, VERBATIM, PromptFormat, build_chat_prompt, build_prompt, read_format
from benchmark.quality.question import DataError, Question
from transformers import PreTrainedTokenizerFast

from chunk_cache.options.defaults import DEFAULT_SEPARATOR as SEPARATOR
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import split_marked
from tokenizer_families import FAMILIES

QUESTION = Question("Read.", ("Paris is in France.", "Rome is in Italy.", "Paris is in France."), "Where?", ("x",))


def test_marked_text_and_priming() -> None:
    prompt = build_prompt(QUESTION, PLAIN)
    france, italy = "Paris is in France.\n\n", "Rome is in Italy.\n\n"
    assert prompt.text == "<|chunk|>".join(["Read.\n\n", france, italy, france, "Where?\nAnswer:"])
    alone = [f"Read.\n\n<|chunk|>{chunk}<|chunk|>" for chunk in (france, italy)]
    assert [body.content for body in prompt.priming()] == alone
    assert prompt.priming(2)[1].content == f"{alone[1]} x x"


@pytest.mark.parametrize("family", ["like GPT-2", "like Llama 3", "like Mistral", "like Gemma"])
def test_a_primed_chunk_has_the_tokens_that_it_has_in_the_prompt(family: str) -> None:
    """Two line breaks at the end of a text are one token, before a word two."""
    texts = ["Paris is in France.\n\n", "Rome is in Italy. x\n\n"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FAMILIES[family](texts))
    prompt = build_prompt(QUESTION, PLAIN)

    def chunks(text: str) -> list[list[int]]:
        encoded = encode_marked(tokenizer, split_marked(text, SEPARATOR, "text"))
        return [encoded.ids[start:end] for start, end in encoded.spans]

    france, italy, _ = chunks(prompt.text)
    assert [chunks(body.content)[-1] for body in prompt.priming(filler="Read this.\n\n")] == [france, italy]
    assert chunks(prompt.shuffled().content) == [italy, france]


@pytest.mark.parametrize(("tail", "answer"), [("Answer:", " x"), ("assistant\n", "x"), ("", "x")])
def test_the_answer_is_written_as_it_follows_the_prompt(tail: str, answer: str) -> None:
    style = PromptFormat(question="{question}" + tail)
    prompt = build_prompt(replace(QUESTION, question=""), style)
    assert (prompt.tail, prompt.answer) == (tail, answer)
    assert not prompt.text.endswith("x")
    both = replace(QUESTION, question="", answers=("x", "y"), require_all=True)
    assert build_prompt(both, style).answer == f"{answer}, y"


def test_prompts_share_a_partition_only_behind_the_same_system_prompt() -> None:
    first = build_prompt(QUESTION)
    same = build_prompt(Question("Read.", ("other",), "other?", ("x",)))
    other = build_prompt(Question("Think.", QUESTION.chunks, QUESTION.question, ("x",)))
    assert first.partition == same.partition != other.partition
    assert len({first.key, same.key, other.key}) == 3


def test_separators_in_the_data_are_removed() -> None:
    prompt = build_prompt(Question("a<|chunk|>b", ("c<|chunk|>",), "{chunk}<|chunk|>d", ("x",)), VERBATIM)
    assert prompt.text == "a b <|chunk|>c  <|chunk|>{chunk} d"


def test_no_system_prompt_leaves_nothing() -> None:
    assert build_prompt(Question("", ("c",), "q", ("x",)), PLAIN).head == ""


def test_chat_template_goes_around_the_chunks() -> None:
    def render(messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages) + "<assistant>"

    prompt = build_chat_prompt(QUESTION, render, VERBATIM)
    assert prompt.head == "<system>Read.</system><user>"
    assert prompt.chunks == tuple(f"{chunk} " for chunk in QUESTION.chunks)
    assert prompt.tail == "Where?</user><assistant>"


def test_a_chat_template_that_changes_chunks_is_refused() -> None:
    with pytest.raises(DataError, match="chat template"):
        build_chat_prompt(
            QUESTION, lambda messages: messages[-1]["content"].upper().replace("CHUNK", "chunk"), VERBATIM
        )


def test_format_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "format.json"
    path.write_text(json.dumps({"chunk": "[{chunk}]\n", "question": "Q: {question} {a}"}))
    assert read_format(path) == PromptFormat(chunk="[{chunk}]\n", question="Q: {question} {a}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        ('{\n"chunk": }', ":2: not JSON"),
        ("[]", "give one object with any of the fields system, chunk, question"),
        ('{"answer": "{answer}"}', "give one object with any of the fields"),
        ('{"chunk": "chunk"}', '"chunk" must be a string that holds {chunk} once'),
        ('{"chunk": "{chunk}{chunk}"}', "once"),
        ('{"system": 3}', '"system" must be a string'),
    ],
)
def test_a_broken_format_is_named(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "format.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError) as error:
        read_format(path)
    assert str(error.value).startswith(str(path))
    assert problem in str(error.value)
