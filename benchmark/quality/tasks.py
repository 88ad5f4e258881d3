"""Tasks: the questions of one family, and how to ask and score them.

`load_tasks` loads what the command line names: `synthetic`, `ruler`, `longbench:FILE`, `jsonl:FILE`, or `summary:FILE`,
which asks for a summary of the passages of such a JSONL; the full prefill's own summary counts as right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmark.quality.loaders.longbench import SUMMARY_DATASETS, SUMMARY_QUESTION, SUMMARY_SYSTEM, read_longbench
from benchmark.quality.loaders.ruler import RULER_FAMILIES, Size, make_ruler
from benchmark.quality.prompts import PLAIN, VERBATIM, Prompt, PromptFormat, build_prompt
from benchmark.quality.question import DataError, Question, read_questions
from benchmark.quality.synthetic.notes import FAMILIES
from benchmark.quality.synthetic.questions import HELD_OUT_SEEDS, make_questions

from chunk_cache_tools.verify.session import Asking

KINDS = "synthetic, ruler, longbench:FILE, jsonl:FILE or summary:FILE"
_NEWLINE = ("\n",)
TRAINED = ("needle", "number", "multi", "carry")
"""Synthetic families that the models of this repository are trained on; others must be named in `--families`."""


@dataclass(frozen=True)
class Task:
    """One family of questions, and how it is asked, scored and written."""

    family: str
    questions: tuple[Question, ...]
    metric: str
    asking: Asking
    style: PromptFormat = PLAIN

    def prompts(self, build: Callable[[Question, PromptFormat], Prompt] = build_prompt) -> list[Prompt]:
        """One prompt per question, in their order, made by `build`."""
        return [build(question, self.style) for question in self.questions]


@dataclass(frozen=True)
class TaskOptions:
    """What the command line may change about tasks.

    Attributes:
        num: most questions per family.
        seed: seed of generated questions.
        size: size of generated haystacks; LongBench's contexts are cut to its `passage_words` too.
    """

    num: int = 300
    seed: int = HELD_OUT_SEEDS[0]
    size: Size = field(default_factory=Size)


def load_tasks(kinds: Sequence[str], families: Sequence[str] | None, options: TaskOptions) -> list[Task]:
    """The tasks of `families`; by default all of these kinds, without synthetic families outside `TRAINED`.

    Raises:
        DataError: an unknown kind or family, one family twice, or a file that is missing or broken.
    """
    makers: dict[str, Callable[[], Task]] = {}
    for kind in kinds:
        for family, maker in _makers(kind, options).items():
            if family in makers:
                raise DataError(f"--tasks: the family {family!r} is there twice; evaluate the files one by one.")
            makers[family] = maker
    unknown = sorted(set(families or ()) - set(makers))
    if unknown:
        raise DataError(f"--families: no family {unknown[0]!r}; choose from {', '.join(makers)}.")
    untrained = set(FAMILIES) - set(TRAINED) if "synthetic" in kinds else set()
    return [makers[family]() for family in families or [name for name in makers if name not in untrained]]


def _makers(kind: str, options: TaskOptions) -> dict[str, Callable[[], Task]]:
    name, _, path = kind.partition(":")
    if kind == "synthetic":
        return {family: partial(synthetic_task, family, options) for family in FAMILIES}
    if kind == "ruler":
        return {family: partial(_ruler_task, family, options) for family in RULER_FAMILIES}
    if name == "longbench" and path:
        questions = read_longbench(path, passage_words=options.size.passage_words, num=options.num)
        return _by_family(questions, _longbench_task)
    if name == "jsonl" and path:
        return _by_family(read_questions(path), partial(_own_task, num=options.num))
    if name == "summary" and path:
        family = f"{Path(path).stem}-summary"
        return {family: partial(_summary_task, family, path, options)}
    raise DataError(f"--tasks: {kind!r} is not one of {KINDS}.")


def synthetic_task(family: str, options: TaskOptions) -> Task:
    """Questions in the language of the models that this repository trains; answers end with EOS."""
    questions = make_questions(family, num=options.num, seed=options.seed)
    longest = max(len(answer.split()) for question in questions for answer in question.answers)
    return Task(family, tuple(questions), "exact_match", Asking(max_new_tokens=longest + 1), VERBATIM)


def _ruler_task(family: str, options: TaskOptions) -> Task:
    questions = make_ruler(family, num=options.num, seed=options.seed, size=options.size)
    return Task(family, tuple(questions), "substring", Asking(max_new_tokens=64, stop=_NEWLINE))


def _longbench_task(family: str, questions: Sequence[Question]) -> Task:
    if family in SUMMARY_DATASETS:
        return Task(family, tuple(questions), "rouge_l", Asking(max_new_tokens=512))
    return Task(family, tuple(questions), "token_f1", Asking(max_new_tokens=64, stop=_NEWLINE))


def _own_task(family: str, questions: Sequence[Question], num: int) -> Task:
    return Task(family, tuple(questions[:num]), "token_f1", Asking(max_new_tokens=64, stop=_NEWLINE))


def _summary_task(family: str, path: str, options: TaskOptions) -> Task:
    told = {"system": SUMMARY_SYSTEM, "question": SUMMARY_QUESTION, "answers": ()}
    questions = tuple(replace(question, **told) for question in read_questions(path)[: options.num])
    return Task(family, questions, "rouge_l", Asking(max_new_tokens=100))


def _by_family(
    questions: Iterable[Question], make: Callable[[str, Sequence[Question]], Task]
) -> dict[str, Callable[[], Task]]:
    grouped: dict[str, list[Question]] = {}
    for question in questions:
        grouped.setdefault(question.family, []).append(question)
    return {family: partial(make, family, members) for family, members in grouped.items()}
