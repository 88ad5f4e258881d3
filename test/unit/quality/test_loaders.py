"""Loaders: generated haystacks hold what they ask for, LongBench files are cut without loss, errors name the line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmark.quality.loaders.longbench import cut_context, read_longbench
from benchmark.quality.loaders.ruler import RULER_FAMILIES, Size, make_ruler
from benchmark.quality.metrics import score
from benchmark.quality.question import DataError, Question, write_questions
from benchmark.quality.tasks import TaskOptions, load_tasks

SMALL = Size(num_words=300, passage_words=60, num_keys=5, num_values=3, num_queries=2, num_hops=3)
NEEDLE = re.compile(r"A code of the (\w+ \w+) is (\d+)\.")
ASSIGNMENT = re.compile(r"Let the variable (\w+) equal (\w+)\.")
LINE = {
    "input": "Where is Paris?",
    "context": "Paris is in France.\n\nRome is in Italy.",
    "answers": ["France"],
    "length": 8,
    "dataset": "geo",
    "language": "en",
    "all_classes": None,
    "_id": "x1",
}


@pytest.mark.parametrize("family", RULER_FAMILIES)
def test_ruler_is_reproducible_and_of_the_size_asked_for(family: str) -> None:
    questions = make_ruler(family, num=5, seed=1, size=SMALL)
    assert questions == make_ruler(family, num=5, seed=1, size=SMALL)
    assert questions[:2] == make_ruler(family, num=2, seed=1, size=SMALL)
    assert not {q.chunks for q in questions} & {q.chunks for q in make_ruler(family, num=5, seed=2, size=SMALL)}
    for question in questions:
        lengths = [len(chunk.split()) for chunk in question.chunks]
        assert SMALL.num_words <= sum(lengths) <= SMALL.num_words + 15
        assert all(SMALL.passage_words <= length <= SMALL.passage_words + 15 for length in lengths[:-1])
        assert score("substring", " ".join(question.answers), question) == 1.0
        assert score("substring", "no idea", question) == 0.0


@pytest.mark.parametrize(
    ("family", "num_needles", "num_answers"),
    [("ruler-single", 1, 1), ("ruler-multi-key", 5, 1), ("ruler-multi-value", 3, 3), ("ruler-multi-query", 2, 2)],
)
def test_ruler_needles_answer_the_question(family: str, num_needles: int, num_answers: int) -> None:
    for question in make_ruler(family, num=20, seed=3, size=SMALL):
        needles = NEEDLE.findall(" ".join(question.chunks))
        assert len(needles) == num_needles
        assert len(question.answers) == num_answers
        asked = {code for key, code in needles if f"the {key}" in question.question}
        assert asked == set(question.answers)


def test_ruler_variables_follow_the_chain_in_text_order() -> None:
    for question in make_ruler("ruler-variables", num=20, seed=3, size=SMALL):
        value = re.search(r"equal (\d+)", question.question)
        assert value is not None
        equal = {value[1]}
        for name, source in ASSIGNMENT.findall(" ".join(question.chunks)):
            if source in equal:
                equal.add(name)
        assert equal - {value[1]} == set(question.answers)
        assert len(question.answers) == SMALL.num_hops + 1


def test_ruler_needles_stand_in_any_passage() -> None:
    places = {
        number / len(question.chunks)
        for question in make_ruler("ruler-single", num=60, seed=0, size=SMALL)
        for number, chunk in enumerate(question.chunks)
        if NEEDLE.search(chunk)
    }
    assert min(places) == 0.0
    assert max(places) >= 0.6


def test_longbench_line_becomes_a_question(tmp_path: Path) -> None:
    path = _write(tmp_path, LINE, {**LINE, "input": "", "dataset": "gov_report"}, {**LINE, "_id": "x3"})
    first, summary = read_longbench(path, num=2)
    assert (first.family, first.id, first.question, first.answers) == ("geo", "x1", "Where is Paris?", ("France",))
    assert first.chunks == ("Paris is in France.\nRome is in Italy.",)
    assert summary.family == "gov_report"
    assert "ummar" in summary.question


def test_longbench_names_the_family_after_the_file_where_the_line_does_not(tmp_path: Path) -> None:
    path = _write(tmp_path, {name: LINE[name] for name in ("input", "context", "answers")})
    assert [question.family for question in read_longbench(path)] == ["lines"]


def test_context_is_cut_at_its_marks() -> None:
    context = "Passage 1:\nParis\nIt is in France.\nPassage 2:\nRome\nSee Passage 1: no.\nPassage 10:\nOslo"
    assert cut_context(context, 3) == (
        "Passage 1:\nParis\nIt is in France.",
        "Passage 2:\nRome\nSee Passage 1: no.",
        "Passage 10:\nOslo",
    )


@pytest.mark.parametrize("passage_words", [1, 7, 40, 10_000])
def test_context_without_marks_is_cut_by_length_and_keeps_its_words(passage_words: int) -> None:
    paragraphs = [" ".join(f"w{i}-{j}" for j in range(5 + 11 * i)) + "." for i in range(6)]
    context = "\n\n".join([*paragraphs, "A. B? C! d", "   "])
    passages = cut_context(context, passage_words)
    assert " ".join(passages).split() == context.split()
    assert all(0 < len(passage.split()) <= passage_words for passage in passages)
    assert len(passages) == 1 or passage_words < 10_000


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"input": ', "not JSON"),
        (json.dumps({**LINE, "answers": "France"}), '"answers" is not a non-empty list of strings'),
        (json.dumps({**LINE, "context": "  "}), '"context" is empty'),
        (json.dumps({**LINE, "context": None}), '"context" is missing or not a string'),
        (json.dumps({k: v for k, v in LINE.items() if k != "input"}), '"input" is missing or not a string'),
        (json.dumps({**LINE, "language": "zh"}), 'the language "zh"'),
    ],
)
def test_a_broken_longbench_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        read_longbench(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert problem in str(error.value)


def test_tasks_of_several_kinds_are_loaded_with_their_metrics(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    write_questions(own, [Question("", ("c",), "q", ("a",), family=f) for f in ("x", "y", "x")])
    lines = _write(tmp_path, LINE, {**LINE, "dataset": "gov_report"})
    kinds = ["synthetic", "ruler", f"longbench:{lines}", f"jsonl:{own}"]
    tasks = {task.family: task for task in load_tasks(kinds, None, TaskOptions(num=2, size=SMALL))}
    assert {name: task.metric for name, task in tasks.items() if name in ("needle", "ruler-single", "geo", "x")} == {
        "needle": "exact_match",
        "ruler-single": "substring",
        "geo": "token_f1",
        "x": "token_f1",
    }
    assert tasks["gov_report"].metric == "rouge_l"
    assert not tasks["gov_report"].asking.stop
    assert [len(tasks[name].questions) for name in ("needle", "ruler-variables", "geo", "x", "y")] == [2, 2, 1, 2, 1]
    assert [task.family for task in load_tasks(kinds, ["y", "carry"], TaskOptions(num=2))] == ["y", "carry"]
    assert "alias1" not in tasks
    assert [task.family for task in load_tasks(kinds, ["alias1"], TaskOptions(num=2))] == ["alias1"]


@pytest.mark.parametrize(
    ("kinds", "families", "problem"),
    [
        (["longbench"], None, "--tasks: 'longbench' is not one of"),
        (["longbench:"], None, "--tasks: 'longbench:' is not one of"),
        (["ruler", "ruler"], None, "is there twice"),
        (["ruler"], ["needle"], "--families: no family 'needle'; choose from ruler-single"),
        (["jsonl:/nowhere/q.jsonl"], None, "/nowhere/q.jsonl: cannot be read"),
    ],
)
def test_wrong_tasks_are_refused(kinds: list[str], families: list[str] | None, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        load_tasks(kinds, families, TaskOptions(num=2))


def _write(folder: Path, *lines: dict) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
