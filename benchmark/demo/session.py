"""Timed requests: `time_warm` (every passage was stored before), `ask_both` (from an empty cache).

Both sides, stock and reuse, are the same server. Stock is `"mode": "off"`: only SGLang's own prefix cache works. Each
side has its own partition (`extra_key`), so neither finds what the other stored. The side that goes first changes with
every question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.common.server import Server, Timed
from benchmark.demo.corpus import Passage, Question
from benchmark.quality.prompts import SEPARATOR, Prompt

from chunk_cache_tools.conditions import REFERENCE, Condition

SYSTEM = (
    "You answer questions about a software project. Use only the passages below, which were taken from its "
    "documentation. Name the passage that you used. If none of them holds the answer, say so in one sentence.\n\n"
)
OUTPUT_LEN = 8


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


@dataclass(frozen=True)
class Clocked:
    """Seconds to the first and the last token of one prompt under one condition; every passage was stored before."""

    condition: Condition
    first_s: float
    total_s: float


def make_prompt(passages: Sequence[Passage], question: Question) -> Prompt:
    """System prompt, the passages, the question."""
    head, *chunks, tail = map(unmarked, (SYSTEM, *(passage.text for passage in passages), question.text))
    return Prompt(head, tuple(chunks), tail)


def unmarked(text: str) -> str:
    """The text without separators: documents may mention the separator, but must not mark chunks."""
    return text.replace(SEPARATOR, "(separator)")


def warm_up(server: Server) -> None:
    """Sends short requests of both sides in extra partitions, so that first-time costs are not measured."""
    prompt = SEPARATOR.join(["Warm up.", " One passage.", " Another passage.", " Done?"])
    for _ in range(2):
        server.stream(prompt, max_new_tokens=2, chunk_cache={"mode": "off"}, extra_key="up-stock")
        server.stream(prompt, max_new_tokens=2, chunk_cache={}, extra_key="up-reuse")
        prompt = SEPARATOR.join(["Warm up.", " Another passage.", " One passage.", " Done?"])


def time_warm(
    server: Server, prompts: Sequence[Prompt], conditions: Sequence[Condition], tick: Callable[[], None]
) -> list[Clocked]:
    """Times every prompt under stock and every condition, after each passage was computed behind the system prompt.

    Stock is prepared as far as possible: its prefix cache holds the system prompt and the first passage of every
    prompt, and the prompts that it has answered stay in the cache.
    """
    primed = [prompt.priming() for prompt in prompts]
    for body in dict.fromkeys(body for bodies in primed for body in bodies):
        server.generate(str(body.content), max_new_tokens=0, chunk_cache={}, extra_key="warm-reuse")
    for body in dict.fromkeys(bodies[0] for bodies in primed):
        server.generate(str(body.content), max_new_tokens=0, chunk_cache=REFERENCE.request, extra_key="warm-stock")
    clocked = []
    order = [REFERENCE, *conditions]
    for prompt in prompts:
        for condition in order:
            side = "warm-stock" if condition == REFERENCE else "warm-reuse"
            timed = server.stream(prompt.text, max_new_tokens=OUTPUT_LEN, chunk_cache=condition.request, extra_key=side)
            clocked.append(Clocked(condition, timed.first_s, timed.total_s))
            tick()
        order = [*order[1:], order[0]]
    return clocked


def ask_both(
    server: Server, prompt: Prompt, question: Question, options: dict[str, Any], stock_first: bool
) -> Exchange:
    """Sends `prompt` to both sides, one after the other."""
    timed: dict[str, Timed] = {}
    for side in ("stock", "reuse") if stock_first else ("reuse", "stock"):
        request = REFERENCE.request if side == "stock" else options
        timed[side] = server.stream(prompt.text, max_new_tokens=1, chunk_cache=request, extra_key=f"cold-{side}")
    stock, reuse = timed["stock"], timed["reuse"]
    num = len(prompt.chunks)
    return Exchange(question.text, num, stock.chunk_cache, reuse.chunk_cache, stock.first_s, reuse.first_s)
