"""QuestionDesk: which question comes next, what becomes of late ones and of those that cannot be scored."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel
from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer
from sglang_chunk_cache.selector.desk import QuestionDesk
from sglang_chunk_cache.selector.selector_messages import IDS, SCORES, Question, Scores, Text
from unit.selector.conftest import TEXT


class Asker:
    """A desk, and questions for it in the main model's tokens."""

    def __init__(self, auxiliary: AuxiliaryModel, main_dir: Path, max_bytes: int = 10**9) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(main_dir)
        self.scorer = ChunkScorer(auxiliary, self.tokenizer, max_bytes)
        self.desk = QuestionDesk(self.scorer)
        self.num_steps = 0

    def text(self, text: str) -> Text:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Text(text.encode(), np.array(ids, dtype=IDS).tobytes())

    def ask(self, number: int, *chunks: str, question: str = "Where?", timeout_s: float = 100.0) -> Question:
        asked = Question(
            number, timeout_s, self.text("Read. "), [self.text(chunk) for chunk in chunks], self.text(question).ids
        )
        self.desk.take(asked, now=0.0)
        return asked

    def run(self, now: float = 1.0) -> list[Scores]:
        answers = []
        while self.desk.has_work:
            answers += self.desk.step(now)
            self.num_steps += 1
        return answers


@pytest.fixture(scope="module")
def auxiliary(auxiliary_dir: Path) -> AuxiliaryModel:
    return AuxiliaryModel.load(str(auxiliary_dir))


@pytest.fixture
def asker(auxiliary: AuxiliaryModel, main_dir: Path) -> Asker:
    return Asker(auxiliary, main_dir)


def test_every_token_of_every_chunk_gets_a_score(asker: Asker) -> None:
    asked = asker.ask(1, TEXT, TEXT[30:])
    (answer,) = asker.run()
    assert (answer.number, answer.reason) == (1, None)
    assert answer.rankings is not None
    for chunk, scores in zip(asked.chunks, answer.rankings, strict=True):
        found = np.frombuffer(scores, dtype=SCORES)
        assert len(found) == len(chunk.ids) // IDS.itemsize
        assert np.isfinite(found).all()


def test_a_question_whose_chunks_are_known_goes_first(asker: Asker) -> None:
    asker.ask(1, TEXT)
    asker.run()
    asker.ask(2, TEXT * 3, TEXT * 2)
    asker.ask(3, TEXT, question="Who?")
    assert [answer.number for answer in asker.run()] == [3, 2]


def test_equal_questions_are_answered_at_once(asker: Asker) -> None:
    for number in range(3):
        asker.ask(number, TEXT)
    asker.ask(3, TEXT, question="Who?")
    first, second, third, other = asker.run()
    assert first.rankings == second.rankings == third.rankings != other.rankings


def test_chunks_of_a_late_question_are_prepared_for_the_next(asker: Asker) -> None:
    asked = asker.ask(1, TEXT, TEXT[30:], timeout_s=0.5)
    assert asker.run(now=1.0) == []
    assert all(asker.scorer.find(chunk.key) is not None for chunk in asked.chunks)
    asker.num_steps = 0
    asker.ask(2, TEXT, TEXT[30:])
    assert len(asker.run()) == 1
    assert asker.num_steps == 1


def test_half_read_chunks_that_nobody_waits_for_are_given_up(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker.desk, "_late", deque(maxlen=1))
    for number in range(5):  # the first chunk of each takes several steps, and the second pushes it out of the line
        asker.ask(number, f"{number} {TEXT * 10}", TEXT, timeout_s=0.5)
        asker.desk.step(now=0.0)
        asker.desk.step(now=1.0)
    assert len(asker.desk._reading) <= 1
    assert asker.run() == []


def test_a_prompt_that_does_not_fit_into_what_is_kept_is_scored(auxiliary: AuxiliaryModel, main_dir: Path) -> None:
    little, much = Asker(auxiliary, main_dir, max_bytes=0), Asker(auxiliary, main_dir)
    for asker in (little, much):
        asker.ask(1, TEXT, TEXT[30:], TEXT[10:])
    (one,), (other,) = little.run(), much.run()
    assert one.rankings == other.rankings
    assert little.scorer.num_bytes == 0


def test_what_cannot_be_scored_gets_a_reason_and_others_go_on(asker: Asker) -> None:
    asked = asker.ask(1, TEXT)
    unknown = np.array([7, 100_000], dtype=IDS).tobytes()
    for number, chunks in ((2, [Text(b"unknown", unknown)]), (3, [asker.text(TEXT * 400)])):
        asker.desk.take(msgspec.structs.replace(asked, number=number, chunks=chunks), now=0.0)
    assert {answer.number: answer.reason for answer in asker.run()} == {
        1: None,
        2: "selector_failed",
        3: "selector_too_long",
    }
    asker.desk.take(
        msgspec.structs.replace(asked, number=4, chunks=[Text(b"unknown", unknown)], timeout_s=0.0), now=1.0
    )
    assert asker.run(now=2.0) == []
