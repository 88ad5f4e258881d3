"""The second part of the demo: a trained model answers, and one sees which answers reuse keeps.

- `ask_all` puts the same questions to one server, to stock SGLang and under a few methods and ratios.
- `build_answer_table` shows how many were right, `show_examples` a few answers word by word.

The model (`benchmark/quality/models/`) has a million parameters and knows one thing: notes in a made-up language of
some 180 words. It is right on what it was trained for, so a wrong answer is the doing of reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.common.machine import ROOT
from benchmark.common.server import Server
from benchmark.quality.conditions import REFERENCE, Condition, parse_method
from benchmark.quality.prompts import VERBATIM, build_prompt
from benchmark.quality.question import Question
from benchmark.quality.session import Asking, Session
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions
from rich.box import SIMPLE_HEAD
from rich.table import Table

MODEL_DIR = ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed0"
FAMILIES = {
    "needle": "a fact inside one passage",
    "multi": "values from several passages, in order",
    "carry": "a fact that only an earlier passage explains",
}
CONDITIONS = (
    REFERENCE,
    Condition(parse_method("full-reuse:shift=0"), 0.0),
    Condition(parse_method("full-reuse"), 0.0),
    *(Condition(parse_method("epic"), ratio) for ratio in (0.15, 0.5)),
    *(Condition(parse_method("fusionrag"), ratio) for ratio in (0.15, 0.5)),
    Condition(parse_method("fusionrag"), 1.0),
)
ASKING = Asking(max_new_tokens=6)


@dataclass(frozen=True)
class Answer:
    """What one question got under one condition."""

    question: Question
    condition: Condition
    text: str

    @property
    def is_right(self) -> bool:
        return self.text.split() == self.question.answers[0].split()


def make_all_questions(num: int) -> list[Question]:
    """`num` questions of each family, none of them used in training."""
    return [q for family in FAMILIES for q in make_questions(family, num=num, seed=HELD_OUT_SEEDS[0])]


def ask_all(server: Server, questions: Sequence[Question]) -> list[Answer]:
    """All questions under all conditions; passages are computed alone first, then reused."""
    session = Session(server, ASKING)
    prompts = [build_prompt(question, VERBATIM) for question in questions]
    by_key = {prompt.key: question for prompt, question in zip(prompts, questions, strict=True)}
    references = {reply.prompt: reply for replies in session.ask_reference(prompts) for reply in replies}
    answers = [Answer(by_key[key], REFERENCE, reply.text) for key, reply in references.items()]
    lengths = {key: reply.prompt_len for key, reply in references.items()}
    for block in session.blocks(prompts, lengths):
        session.prime(block)
        for condition in CONDITIONS[1:]:
            for replies in session.ask([(prompt, condition) for prompt in block], references):
                answers += [Answer(by_key[reply.prompt], condition, reply.text) for reply in replies]
    return answers


def build_answer_table(answers: Sequence[Answer]) -> Table:
    """Right answers by condition and family."""
    table = Table(title="Right answers of a small trained model", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("method")
    table.add_column("ratio", justify="right")
    for family, what in FAMILIES.items():
        table.add_column(f"{family}: {what}", justify="right", max_width=24)
    for condition in CONDITIONS:
        cells = []
        for family in FAMILIES:
            own = [a.is_right for a in answers if a.condition == condition and a.question.family == family]
            cells.append(f"{sum(own)} of {len(own)}")
        ratio = "" if condition.ratio is None else f"{condition.ratio:g}"
        table.add_row(name_of(condition), ratio, *cells)
    return table


def name_of(condition: Condition) -> str:
    if condition == REFERENCE:
        return "stock, full prefill"
    return "reuse without position shift" if condition.label == "full-reuse:shift=0" else condition.label


def show_examples(answers: Sequence[Answer]) -> list[str]:
    """One question of each family with its answers under three conditions."""
    lines = []
    shown = (REFERENCE, CONDITIONS[2], CONDITIONS[-2])
    for family in FAMILIES:
        question = next(a.question for a in answers if a.question.family == family)
        texts = [
            f"{name_of(a.condition)}{'' if a.condition.ratio is None else f' {a.condition.ratio:g}'}: {a.text.strip()}"
            for condition in shown
            for a in answers
            if a.question is question and a.condition == condition
        ]
        lines.append(f'{family}: "{question.question}" ({question.answers[0]}) -> ' + "; ".join(texts))
    return lines
