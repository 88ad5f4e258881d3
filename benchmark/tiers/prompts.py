"""Prompts of the benchmarks of tiers, all of random token ids from one seed: `Corpus`.

    | system | chunk ... chunk | question |
    |<exact>|<--- reused ---->|<- new ->|

Only the system prompt is in the exact cache; every chunk was computed alone behind it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.common.models import FIRST_PLAIN_ID, LlamaShape
from benchmark.ttft.workload import Prompt


@dataclass(frozen=True)
class Size:
    """Model and prompt of one benchmark; lengths in tokens."""

    shape: LlamaShape
    system_len: int
    chunk_len: int
    num_chunks: int
    question_len: int

    @property
    def prompt_len(self) -> int:
        return self.system_len + self.num_chunks * self.chunk_len + self.question_len

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV, all layers, in fp32."""
        shape = self.shape
        return shape.layers * 2 * shape.kv_heads * (shape.hidden // shape.heads) * 4

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV of all chunks of a prompt."""
        return self.num_chunks * self.chunk_len * self.bytes_per_token

    def __str__(self) -> str:
        return (
            f"{self.prompt_len} tokens = {self.system_len} system + {self.num_chunks} chunks of {self.chunk_len} + "
            f"{self.question_len} question; a chunk has {self.chunk_len * self.bytes_per_token / 1e6:.3g} MB"
        )


class Corpus:
    """A system prompt and chunks; the same seed gives the same tokens.

    Args:
        num_chunks: chunks of the corpus, not of one prompt.
    """

    def __init__(self, size: Size, num_chunks: int, seed: int = 0) -> None:
        self.size = size
        self._draw = random.Random(seed)
        self.system = self.tokens(size.system_len)
        self.chunks = [self.tokens(size.chunk_len) for _ in range(num_chunks)]

    def tokens(self, length: int) -> list[int]:
        """New random token ids."""
        return random_tokens(self._draw, length, self.size.shape.vocab)

    def prompt(self, order: Sequence[int], question: Sequence[int]) -> Prompt:
        """A prompt: system prompt, the chunks with these numbers in this order, question."""
        ids, spans = list(self.system), []
        for number in order:
            spans.append([len(ids), len(ids) + self.size.chunk_len])
            ids += self.chunks[number]
        return Prompt([*ids, *question], spans)

    def prompt_of(self, order: Sequence[int]) -> Prompt:
        """A prompt of these chunks, with a new question."""
        return self.prompt(order, self.tokens(self.size.question_len))


def random_tokens(draw: random.Random, length: int, vocab: int) -> list[int]:
    return [draw.randrange(FIRST_PLAIN_ID, vocab) for _ in range(length)]
