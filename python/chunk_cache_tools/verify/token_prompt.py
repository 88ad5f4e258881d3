"""TokenPrompt: a marked prompt as token ids; the command sends every prompt in this form."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from chunk_cache.types import Span
from chunk_cache_tools.verify.reply_log import Reply
from chunk_cache_tools.verify.session import Body

Ids = tuple[int, ...]


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt of the session (`verify.session.Prompt`).

    Attributes:
        ids: the whole prompt.
        spans: `(start, end)` of each chunk, ascending; at least one.
        gold: token ids of a right answer behind the prompt; empty if none is known.
    """

    ids: Ids
    spans: tuple[Span, ...]
    gold: Ids = ()

    @property
    def head(self) -> Ids:
        """The tokens before the first chunk."""
        return self.ids[: self.spans[0][0]]

    @property
    def chunks(self) -> tuple[Ids, ...]:
        """The different chunks, in order of their first occurrence."""
        return tuple(dict.fromkeys(self.ids[start:end] for start, end in self.spans))

    @property
    def question_len(self) -> int:
        """Number of tokens behind the last chunk."""
        return len(self.ids) - self.spans[-1][1]

    @property
    def key(self) -> str:
        return _digest((*self.ids, -1, *(place for span in self.spans for place in span), -1, *self.gold))

    @property
    def partition(self) -> str:
        return _digest(self.head)

    @property
    def body(self) -> Body:
        return Body(self.ids, self.spans)

    def front(self, filler: Ids) -> Body:
        return Body((*self.head, *filler), ())

    def priming(self, page_size: int, filler: Ids | None = None) -> tuple[Body, ...]:
        behind = () if filler is None else (filler,)
        return tuple(self._marked([*behind, chunk], page_size) for chunk in self.chunks)

    def shuffled(self, page_size: int) -> Body:
        chunks = list(self.chunks)
        draw = random.Random(self.key)
        while len(chunks) > 1 and tuple(chunks) == self.chunks:  # the same order would be an exact prefix
            draw.shuffle(chunks)
        return self._marked(chunks, page_size)

    def answered(self, reference: Reply) -> dict[str, Body]:
        answers = {"gold": self.gold, "own": reference.ids}
        return {name: Body(self.ids + answer, self.spans) for name, answer in answers.items() if answer}

    def _marked(self, chunks: Iterable[Ids], page_size: int) -> Body:
        """These chunks behind the head. With pages, one page of tokens follows, because only full pages are stored."""
        ids, spans = list(self.head), []
        for chunk in chunks:
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        return Body((*ids, *([ids[-1]] * page_size if page_size > 1 else [])), tuple(spans))


def _digest(numbers: Iterable[int]) -> str:
    return hashlib.blake2b(array("q", numbers).tobytes(), digest_size=8).hexdigest()
