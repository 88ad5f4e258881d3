"""Questions from a file: what is written comes back, and a broken line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark.quality.question import DataError, Question, read_questions, write_questions

GOOD = {"system": "Read.", "chunks": ["Paris is in France."], "question": "Where is Paris?", "answers": ["France"]}


def test_written_questions_are_read_back(tmp_path: Path) -> None:
    questions = [
        Question("Read.", ("a\nb", "Straße"), "q?", ("1", "2"), family="own", id="7", require_all=True),
        Question("", ("x",), "q?", ("",)),
    ]
    write_questions(tmp_path / "q.jsonl", questions)
    assert read_questions(tmp_path / "q.jsonl") == questions


def test_family_id_and_system_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n" + json.dumps({k: v for k, v in GOOD.items() if k != "system"}) + "\n\n")
    assert read_questions(path) == [Question("", ("Paris is in France.",), "Where is Paris?", ("France",))]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        (json.dumps({**GOOD, "chunks": "Paris"}), '"chunks" is not a non-empty list of strings'),
        (json.dumps({**GOOD, "answers": []}), '"answers" is not a non-empty list of strings'),
        (json.dumps({**GOOD, "chunks": ["a", " "]}), "an empty chunk"),
        (json.dumps({**GOOD, "question": None}), '"question" is missing or not a string'),
        (json.dumps({**GOOD, "family": 3}), '"family" is missing or not a string'),
        (json.dumps({**GOOD, "require_all": 1}), '"require_all" is not true or false'),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(DataError) as error:
        read_questions(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert problem in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe{}"])
def test_a_missing_empty_or_binary_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "q.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        read_questions(path)
