"""LongBench-style files: `read_longbench` (JSONL with input, context, answers -> questions), `cut_context`.

A line is one object (Bai et al. 2024): `input` (the question; empty for summaries), `context` (one long text),
`answers` (list), and optionally `dataset`, `language`, `all_classes`, `length`, `_id`. The context is cut at its own
marks ("Passage 1:") if it has them, else its paragraphs are joined into passages of similar length.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmark.quality.question import DataError, Question, read_jsonl

SYSTEM = "Answer from the passages. Give only the answer."
SUMMARY_SYSTEM = "Read the passages."
SUMMARY_QUESTION = "Summarize the passages in one paragraph."

# Data sets of LongBench whose answers are long texts; the others ask for a few words.
SUMMARY_DATASETS = frozenset({"gov_report", "qmsum", "multi_news", "samsum"})
# Words are not separated by spaces there, and the metrics count words.
_UNSUPPORTED_LANGUAGES = ("zh",)

_MARK = re.compile(r"^(?=Passage \d+:)", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def read_longbench(path: str | Path, *, passage_words: int = 200, num: int | None = None) -> list[Question]:
    """The first `num` questions of a file, or all; the family is the name of the data set, or else of the file.

    Raises:
        DataError: the file is missing, empty or broken; the message names the line.
    """
    path = Path(path)
    questions: list[Question] = []
    for where, value in read_jsonl(path):
        if num is not None and len(questions) == num:
            break
        questions.append(_question(value, where, path.stem, passage_words))
    if not questions:
        raise DataError(f"{path}: no question in it; give one JSON object per line.")
    return questions


def cut_context(context: str, passage_words: int) -> tuple[str, ...]:
    """Cuts a text into passages; only passages cut at marks can have more than `passage_words` words."""
    marked = [piece.strip() for piece in _MARK.split(context) if piece.strip()]
    if len(marked) > 1:
        return tuple(marked)
    passages: list[str] = []
    taken: list[str] = []
    num_words = 0
    for piece in _pieces(context, passage_words):
        piece_words = len(piece.split())
        if taken and num_words + piece_words > passage_words:
            passages.append("\n".join(taken))
            taken, num_words = [], 0
        taken.append(piece)
        num_words += piece_words
    return (*passages, "\n".join(taken)) if taken else tuple(passages)


def _pieces(context: str, passage_words: int) -> list[str]:
    """Paragraphs; long ones are cut into sentences, and long sentences between words."""
    pieces: list[str] = []
    for paragraph in filter(None, map(str.strip, context.split("\n"))):
        if len(paragraph.split()) <= passage_words:
            pieces.append(paragraph)
            continue
        for sentence in _SENTENCE_END.split(paragraph):
            words = sentence.split()
            pieces += [" ".join(words[i : i + passage_words]) for i in range(0, len(words), passage_words)]
    return pieces


def _question(value: dict[str, Any], where: str, file_stem: str, passage_words: int) -> Question:
    answers = value.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f'{where}: "answers" is not a non-empty list of strings.')
    for name, default in (("input", None), ("context", None), ("dataset", ""), ("_id", ""), ("language", "")):
        if not isinstance(value.get(name, default), str):
            raise DataError(f'{where}: "{name}" is missing or not a string.')
    if not value["context"].strip():
        raise DataError(f'{where}: "context" is empty.')
    if value.get("language") in _UNSUPPORTED_LANGUAGES:
        raise DataError(
            f'{where}: no metric here counts words of the language "{value["language"]}"; use another file.'
        )
    family = value.get("dataset") or file_stem
    is_summary = not value["input"].strip() or family in SUMMARY_DATASETS
    return Question(
        system=SUMMARY_SYSTEM if is_summary else SYSTEM,
        chunks=cut_context(value["context"], passage_words),
        question=value["input"].strip() or SUMMARY_QUESTION,
        answers=tuple(answers),
        family=family,
        id=value.get("_id", ""),
    )
