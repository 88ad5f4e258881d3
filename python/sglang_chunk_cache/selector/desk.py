"""QuestionDesk: the questions that wait for the selector, and the next thing to do for one of them.

Verbs: `take` (a question has come), `step` (does a bounded piece of work, returns answers), `has_work`.

Promises: questions whose chunks are all prepared go first, then other questions, then chunks that nobody waits for any
more; equal questions are answered together. A late question is dropped, but its chunks are still prepared when there is
nothing else to do, so that the next question finds them. A question that cannot be scored is answered with the reason.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer, ReadChunk, TooLong
from sglang_chunk_cache.selector.selector_messages import IDS, Question, Scores, Text

logger = logging.getLogger(__name__)

MAX_LATE = 1024
"""Most chunks of late questions that are still to be prepared; beyond that, the oldest are forgotten."""

_Reading = Iterator[ReadChunk | None]


@dataclass
class _Waiting:
    question: Question
    deadline: float
    read: dict[bytes, ReadChunk] = field(default_factory=dict)

    @property
    def missing(self) -> Text | None:
        """A chunk that is not prepared yet."""
        return next((chunk for chunk in self.question.chunks if chunk.key not in self.read), None)

    def asks_the_same(self, other: Question) -> bool:
        mine = self.question
        return (mine.prefix.key, mine.question, mine.chunks) == (other.prefix.key, other.question, other.chunks)


class QuestionDesk:
    def __init__(self, scorer: ChunkScorer) -> None:
        self._scorer = scorer
        self._waiting: list[_Waiting] = []
        self._late: deque[tuple[Text, Text]] = deque(maxlen=MAX_LATE)  # prefix, chunk
        self._reading: dict[bytes, _Reading] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._late)

    def take(self, question: Question, now: float) -> None:
        """Takes a question, which is late after its `timeout_s`."""
        self._waiting.append(_Waiting(question, now + question.timeout_s))

    def step(self, now: float) -> list[Scores]:
        """Does the next piece of work; returns the answers that it brought."""
        for waiting in [waiting for waiting in self._waiting if waiting.deadline <= now]:
            self._waiting.remove(waiting)
            self._late += [(waiting.question.prefix, chunk) for chunk in waiting.question.chunks]
            self._forget_unwanted()
        for waiting in self._waiting:
            for chunk in waiting.question.chunks:
                if chunk.key not in waiting.read and (found := self._scorer.find(chunk.key)) is not None:
                    waiting.read[chunk.key] = found
        ready = next((waiting for waiting in self._waiting if waiting.missing is None), None)
        if ready is not None:
            return self._answer(ready)
        if self._waiting:
            return self._read_for(self._waiting[0])
        if self._late:
            self._read_late(*self._late[0])
        return []

    def _forget_unwanted(self) -> None:
        """Half-read chunks that no question waits for, and that are not among the late ones, are given up."""
        wanted = {chunk.key for waiting in self._waiting for chunk in waiting.question.chunks}
        wanted |= {chunk.key for _, chunk in self._late}
        self._reading = {key: reading for key, reading in self._reading.items() if key in wanted}

    def _answer(self, ready: _Waiting) -> list[Scores]:
        question = ready.question
        chunks = [ready.read[chunk.key] for chunk in question.chunks]
        try:
            scores = self._scorer.score(ids_of(question.question), chunks)
        except (ValueError, IndexError, RuntimeError) as error:
            return self._refuse(ready, error)
        rankings = [np.ascontiguousarray(one, dtype=np.float32).tobytes() for one in scores]
        return [Scores(one.question.number, rankings) for one in self._leave(ready)]

    def _read_for(self, waiting: _Waiting) -> list[Scores]:
        chunk = waiting.missing
        assert chunk is not None
        try:
            self._read(waiting.question.prefix, chunk)
        except (ValueError, IndexError, RuntimeError) as error:
            self._reading.pop(chunk.key, None)
            return self._refuse(waiting, error)
        return []

    def _read_late(self, prefix: Text, chunk: Text) -> None:
        try:
            is_read = self._scorer.find(chunk.key) is not None or self._read(prefix, chunk)
        except (ValueError, IndexError, RuntimeError) as error:
            logger.warning("Chunk cache: selector: a chunk was not prepared: %s", error)
            is_read = True
            self._reading.pop(chunk.key, None)
        if is_read:
            self._late.popleft()

    def _read(self, prefix: Text, chunk: Text) -> bool:
        """Does one step of reading a chunk; returns whether the chunk is now read."""
        if chunk.key not in self._reading:
            prepare = partial(self._scorer.prepare, chunk.key, ids_of(chunk.ids))
            self._reading[chunk.key] = prepare(prefix.key, ids_of(prefix.ids))
        read = next(self._reading[chunk.key])
        if read is None:
            return False
        del self._reading[chunk.key]
        for waiting in self._waiting:  # questions hold the chunk, however few bytes the scorer may keep
            if any(chunk.key == wanted.key for wanted in waiting.question.chunks):
                waiting.read[chunk.key] = read
        return True

    def _refuse(self, waiting: _Waiting, error: Exception) -> list[Scores]:
        logger.warning("Chunk cache: selector: a question was not scored: %s: %s", type(error).__name__, error)
        reason = "selector_too_long" if isinstance(error, TooLong) else "selector_failed"
        return [Scores(one.question.number, None, reason) for one in self._leave(waiting)]

    def _leave(self, answered: _Waiting) -> list[_Waiting]:
        """Removes this question and all equal ones from those that wait, and returns them."""
        same = [waiting for waiting in self._waiting if waiting.asks_the_same(answered.question)]
        self._waiting = [waiting for waiting in self._waiting if not waiting.asks_the_same(answered.question)]
        return same


def ids_of(data: bytes) -> list[int]:
    """Token ids of a message."""
    return np.frombuffer(data, dtype=IDS).tolist()
