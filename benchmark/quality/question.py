"""Question: one question over several passages, with its accepted answers; every part of the harness uses it.

`read_questions` and `write_questions` read and write JSONL, one object per line:
`{"system": "...", "chunks": ["...", ...], "question": "...", "answers": ["...", ...], "family": "...", "id": "..."}`;
`system`, `family` and `id` may be left out. With `"require_all": true` a reply must give all answers, not one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunk_cache_tools.jsonl import DataError, read_jsonl


@dataclass(frozen=True)
class Question:
    """The prompt is `system`, `chunks`, `question`; one of `answers` is enough, unless `require_all`.

    Without answers (never in a file), the full prefill's own reply counts as the right one.
    """

    system: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    family: str = "all"
    id: str = ""
    require_all: bool = False


def write_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Writes JSONL that `read_questions` reads back equal."""
    lines = [json.dumps(asdict(question), ensure_ascii=False) for question in questions]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a JSONL file; empty lines are skipped.

    Raises:
        DataError: the file is missing or empty, or a line is no question.
    """
    path = Path(path)
    questions = [question_of(value, where) for where, value in read_jsonl(path)]
    if not questions:
        raise DataError(f"{path}: no question in it; give one JSON object per line.")
    return questions


def question_of(value: dict[str, Any], where: str) -> Question:
    """A checked question.

    Raises:
        DataError: a field is missing or has the wrong type; the message begins with `where`.
    """
    for name in ("chunks", "answers"):
        items = value.get(name)
        if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
            raise DataError(f'{where}: "{name}" is not a non-empty list of strings.')
    if not all(chunk.strip() for chunk in value["chunks"]):
        raise DataError(f'{where}: an empty chunk in "chunks"; leave it out.')
    for name, default in (("system", ""), ("question", None), ("family", "all"), ("id", "")):
        if not isinstance(value.get(name, default), str):
            raise DataError(f'{where}: "{name}" is missing or not a string.')
    if not isinstance(value.get("require_all", False), bool):
        raise DataError(f'{where}: "require_all" is not true or false.')
    return Question(
        system=value.get("system", ""),
        chunks=tuple(value["chunks"]),
        question=value["question"],
        answers=tuple(value["answers"]),
        family=value.get("family", "all"),
        id=value.get("id", ""),
        require_all=value.get("require_all", False),
    )
