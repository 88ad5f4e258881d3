"""Asking: a model is asked one question after the other, and a run that was stopped goes on where it was.

Verbs: `chat_or_text` (a question as the model reads it), `ask_each`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmark.common.results import describe_run
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.rows import RowModel
from benchmark.quality.prompts import Prompt, PromptFormat, build_chat_prompt, build_prompt
from benchmark.quality.question import Question

T = TypeVar("T")
Line = dict[str, Any]


def chat_or_text(model: RowModel, question: Question, style: PromptFormat) -> Prompt:
    """A chat prompt where the model has a template, else text of this style."""

    def render(messages: list[dict[str, str]]) -> str:
        text: str = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    return build_chat_prompt(question, render) if model.tokenizer.chat_template else build_prompt(question, style)


def ask_each(
    args: argparse.Namespace,
    name: str,
    wanted: Sequence[tuple[str, T]],
    own_len: int,
    prompt_of: Callable[[RowModel, T], Prompt],
    results_of: Callable[[Case, Prompt, T], Mapping[str, Any]],
    page: Callable[[Sequence[Line], argparse.Namespace, dict[str, Any]], str] | None,
) -> None:
    """Keeps a line for each question in OUT/NAME.jsonl, and writes the page of all lines, OUT/NAME.md, at the end.

    Args:
        args: with `model`, `max_tokens` (longer prompts are left out) and `out`; several processes may share an OUT.
        wanted: questions by key; those of which a line is kept are not asked again.
        own_len: tokens of full prefill's own answer, at most.
        results_of: what is kept of a question.
        page: None leaves it unwritten, for a process that asks a part of the questions.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / f"{name}.jsonl"
    done = {line["key"] for line in _read(kept)}
    todo = [(key, one) for key, one in wanted if key not in done]
    about = describe_run()
    model = RowModel(args.model) if todo else None
    began = time.monotonic()
    for number, (key, one) in enumerate(todo, 1):
        assert model is not None
        start = time.monotonic()
        prompt = prompt_of(model, one)
        if len(model.tokenizer.encode(prompt.text)) > args.max_tokens:
            continue
        case = Case.build(model, prompt, own_len=own_len)
        found = {"full_finds": case.full_finds, "results": results_of(case, prompt, one)}
        line = {"key": key, "prompt_len": case.prompt_len, "own_len": len(case.own), **found}
        line["seconds"] = time.monotonic() - start
        with kept.open("a") as file:
            file.write(json.dumps(line) + "\n")
        left = (time.monotonic() - began) / number * (len(todo) - number)
        print(f"{key}: {line['seconds']:.1f} s, about {left / 60:.0f} minutes left", flush=True)
    if page is not None:
        (args.out / f"{name}.md").write_text(page(_read(kept), args, about))


def _read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
