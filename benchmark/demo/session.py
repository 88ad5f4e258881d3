"""Asking the questions: `ask_both` sends one prompt twice, to stock SGLang and with reuse, and keeps both clocks.

Both sides are the same server. Stock is `"mode": "off"`: SGLang's own prefix cache works, nothing else. The sides live
in two partitions (`extra_key`), in which neither finds what the other has left; the one that goes first changes with
every question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.common.server import Server, Timed
from benchmark.demo.corpus import Passage, Question
from benchmark.quality.prompts import SEPARATOR

SYSTEM = (
    "You answer questions about a software project. Use only the passages below, which were taken from its "
    "documentation. Name the passage that you used. If none of them holds the answer, say so in one sentence.\n\n"
)
OUTPUT_LEN = 4


@dataclass(frozen=True)
class Exchange:
    """One question with its replies.

    Attributes:
        question: what was asked.
        num_passages: how many passages the prompt holds.
        stock, reuse: the chunk cache's reply objects of both sides; token counts as in docs/api.md.
        stock_s, reuse_s: seconds to the first token.
    """

    question: str
    num_passages: int
    stock: dict[str, Any]
    reuse: dict[str, Any]
    stock_s: float
    reuse_s: float

    @property
    def prompt_len(self) -> int:
        return sum(self.reuse[name] for name in ("prefix_tokens", "reused_tokens", "computed_tokens"))

    @property
    def speedup(self) -> float:
        return self.stock_s / self.reuse_s

    @property
    def num_missed(self) -> int:
        """Passages that were not stored yet."""
        return sum(chunk["status"] == "miss" for chunk in self.reuse["chunks"])


def build_prompt(passages: Sequence[Passage], question: Question) -> str:
    """System prompt, the passages marked with separators, the question."""
    return SEPARATOR.join(unmarked(piece) for piece in (SYSTEM, *(passage.text for passage in passages), question.text))


def unmarked(text: str) -> str:
    """The text without separators: documents may speak of the separator, but must not mark anything."""
    return text.replace(SEPARATOR, "(separator)")


def warm_up(server: Server) -> None:
    """One short request of each side in partitions of their own, so that first-time costs are nobody's."""
    prompt = SEPARATOR.join(["Warm up.", " One passage.", " Another passage.", " Done?"])
    for _ in range(2):
        server.stream(prompt, max_new_tokens=2, chunk_cache={"mode": "off"}, extra_key="warm-stock")
        server.stream(prompt, max_new_tokens=2, chunk_cache={}, extra_key="warm-reuse")
        prompt = SEPARATOR.join(["Warm up.", " Another passage.", " One passage.", " Done?"])


def ask_both(
    server: Server, prompt: str, question: Question, num_passages: int, options: dict[str, Any], stock_first: bool
) -> Exchange:
    """Sends `prompt` to both sides, one after the other."""
    timed: dict[str, Timed] = {}
    for side in ("stock", "reuse") if stock_first else ("reuse", "stock"):
        chunk_cache = {"mode": "off"} if side == "stock" else options
        timed[side] = server.stream(prompt, max_new_tokens=OUTPUT_LEN, chunk_cache=chunk_cache, extra_key=side)
    stock, reuse = timed["stock"], timed["reuse"]
    return Exchange(question.text, num_passages, stock.chunk_cache, reuse.chunk_cache, stock.first_s, reuse.first_s)
