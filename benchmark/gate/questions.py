"""Questions of the trained models as token ids: `make_prompts`, each with its chunks and with what stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.quality.prompts import VERBATIM, build_prompt
from benchmark.quality.synthetic.questions import make_questions
from transformers import AutoTokenizer


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt of token ids; `priming` are the ids and spans of shorter ones that store its chunks."""

    family: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    priming: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]


def make_prompts(model_dir: Path, family: str, num: int, seed: int = 7001) -> list[TokenPrompt]:
    """`num` questions of one family that no model was trained on; each asks about notes of its own."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def encode(text: str, *, is_first: bool = False) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=is_first))

    prompts = []
    for question in make_questions(family, num=num, seed=seed):
        prompt = build_prompt(question, VERBATIM)
        head = encode(prompt.head, is_first=True)
        chunks = [encode(chunk) for chunk in prompt.chunks]
        ids, spans = _joined(head, chunks)
        priming = tuple(_joined(head, [chunk]) for chunk in chunks)
        prompts.append(TokenPrompt(family, (*ids, *encode(prompt.tail)), spans, priming))
    return prompts


def _joined(
    head: Sequence[int], chunks: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return tuple(ids), tuple(spans)
