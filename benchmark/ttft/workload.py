"""The prompts of the time-to-first-token benchmark, all of random token ids from one seed.

    | system | chunk | chunk ... chunk | question |
    |<- exact prefix ->|<-- reused --->|<- new -->|

Every chunk is primed alone behind the system prompt, so the system prompt and the first chunk are an exact prefix for
stock SGLang too. No two measured prompts begin with the same two chunks, so a prompt left in the exact cache helps no
other prompt beyond the first chunk.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmark.common.models import FIRST_PLAIN_ID, LlamaShape


@dataclass(frozen=True)
class Size:
    """Model and prompt of one benchmark; lengths in tokens."""

    shape: LlamaShape
    system_len: int
    chunk_len: int
    num_chunks: int
    question_len: int

    @property
    def prefix_len(self) -> int:
        """What stock SGLang reuses: the system prompt and the first chunk."""
        return self.system_len + self.chunk_len

    @property
    def prompt_len(self) -> int:
        return self.system_len + self.num_chunks * self.chunk_len + self.question_len

    @property
    def num_reused_chunks(self) -> int:
        return self.num_chunks - 1

    def __str__(self) -> str:
        return (
            f"{self.prompt_len} tokens = {self.system_len} system + {self.num_chunks} chunks of {self.chunk_len} + "
            f"{self.question_len} question; exact prefix {self.prefix_len}, {self.num_reused_chunks} chunks reused"
        )


FULL = Size(LlamaShape(12, 768, 12, 12, 2048, 2048), system_len=96, chunk_len=448, num_chunks=9, question_len=32)
QUICK = Size(LlamaShape(4, 256, 4, 4, 704, 2048), system_len=96, chunk_len=160, num_chunks=5, question_len=32)


@dataclass(frozen=True)
class Prompt:
    """Token ids and the half-open spans of the chunks in them."""

    ids: list[int]
    spans: list[list[int]]


class Workload:
    """Hands out prompts; the n-th prompt of a seed is always the same.

    Args:
        num_spare: chunks that are primed beyond the number in a prompt; each prompt leaves so many out.
    """

    def __init__(self, size: Size, seed: int = 0, *, num_spare: int = 0) -> None:
        self.size = size
        self._draw = random.Random(seed)
        self._system = self.tokens(size.system_len)
        self._chunks = [self.tokens(size.chunk_len) for _ in range(size.num_chunks + num_spare)]
        self._beginnings = self._all_beginnings()

    def tokens(self, length: int) -> list[int]:
        """New random token ids."""
        return [self._draw.randrange(FIRST_PLAIN_ID, self.size.shape.vocab) for _ in range(length)]

    def priming(self) -> list[Prompt]:
        """One prompt per chunk: the system prompt and the chunk."""
        start, end = self.size.system_len, self.size.prefix_len
        return [Prompt(self._system + chunk, [[start, end]]) for chunk in self._chunks]

    def fresh(self) -> Prompt:
        """A prompt with the chunks in a new order, and a new question.

        Raises:
            StopIteration: no pair of first chunks is left; use fewer repeats.
        """
        first, second = next(self._beginnings)
        rest = [i for i in range(len(self._chunks)) if i not in (first, second)]
        self._draw.shuffle(rest)
        ids, spans = list(self._system), []
        for i in (first, second, *rest[: self.size.num_chunks - 2]):
            spans.append([len(ids), len(ids) + self.size.chunk_len])
            ids += self._chunks[i]
        return Prompt(ids + self.tokens(self.size.question_len), spans)

    def unseen(self) -> Prompt:
        """A prompt like those of `fresh`, but with new chunks."""
        ids, spans = list(self._system), []
        for _ in range(self.size.num_chunks):
            spans.append([len(ids), len(ids) + self.size.chunk_len])
            ids += self.tokens(self.size.chunk_len)
        return Prompt(ids + self.tokens(self.size.question_len), spans)

    @property
    def num_fresh(self) -> int:
        """How many prompts `fresh` can make in all."""
        return len(self._chunks) * (len(self._chunks) - 1)

    def _all_beginnings(self) -> Iterator[tuple[int, int]]:
        pairs = list(itertools.permutations(range(len(self._chunks)), 2))
        self._draw.shuffle(pairs)
        return iter(pairs)
