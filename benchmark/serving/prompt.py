"""Prompt: one request of a serving trace, before a `Writer` turns it into the request of one system.

    | head | chunk | chunk ... chunk | tail |

- `Piece` is text or token ids; all pieces of a prompt are of one kind.
- `Prompt.reordered` returns the same chunks in another order, `body` the request for `/generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmark.quality.prompts import SEPARATOR
from benchmark.quality.question import DataError

Piece: TypeAlias = str | tuple[int, ...]


CHARACTERS_PER_TOKEN = 4


def num_tokens(piece: Piece) -> int:
    """Number of token ids; for text, an estimate from its characters."""
    return -(-len(piece) // CHARACTERS_PER_TOKEN) if isinstance(piece, str) else len(piece)


@dataclass(frozen=True)
class Chunk:
    """A retrieved passage; chunks with the same `key` have the same content."""

    key: str
    content: Piece


@dataclass(frozen=True)
class Prompt:
    """What a client wants answered.

    Attributes:
        head, tail: text in front of the chunks and behind them: system prompt and question.
        output_len: tokens to generate.
        session: number of the session that it belongs to.
        arrival_s: seconds from the first request of a recorded trace; None if the trace has no times.
        answer: the right answer, compared word by word; None if unknown.
        answer_of: returns the right answer for texts of chunks in their order, if it depends on the order.
        ends_at_eos: generation may end before `output_len`.
    """

    head: Piece
    chunks: tuple[Chunk, ...]
    tail: Piece
    output_len: int
    session: int = 0
    arrival_s: float | None = None
    answer: str | None = None
    answer_of: Callable[[list[Piece]], str] | None = None
    ends_at_eos: bool = False

    def reordered(self, keys: Sequence[str]) -> Prompt:
        """The prompt with the chunks that `keys` name, in that order; other chunks are left out."""
        by_key = {chunk.key: chunk for chunk in self.chunks}
        chunks = tuple(by_key[key] for key in keys)
        answer = self.answer if self.answer_of is None else self.answer_of([chunk.content for chunk in chunks])
        return replace(self, chunks=chunks, answer=answer)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the whole prompt.

        Raises:
            DataError: the prompt is text.
        """
        pieces = (self.head, *(chunk.content for chunk in self.chunks), self.tail)
        found: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                raise DataError("a prompt of text where token ids are wanted; leave out the systems that need them.")
            found += piece
        return tuple(found)

    def body(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON body of a streamed `/generate`.

        Args:
            options: options of the chunk cache; the chunks are marked. None: a plain request for stock SGLang.
        """
        params: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": self.output_len,
            "ignore_eos": not self.ends_at_eos,
        }
        own = None if options is None else dict(options)
        pieces = (self.head, *(chunk.content for chunk in self.chunks), self.tail)
        prompt: dict[str, Any]
        if isinstance(self.head, str):
            prompt = {"text": ("" if own is None or not self.chunks else SEPARATOR).join(pieces)}  # type: ignore[arg-type]
        else:
            prompt = {"input_ids": list(self.tokens)}
            if own is not None and self.chunks:
                own["spans"] = self._spans()
        if own is not None:
            params["custom_params"] = {"chunk_cache": own}
        return {**prompt, "sampling_params": params, "stream": True}

    def _spans(self) -> list[list[int]]:
        spans, end = [], len(self.head)
        for chunk in self.chunks:
            spans.append([end, end + len(chunk.content)])
            end += len(chunk.content)
        return spans
