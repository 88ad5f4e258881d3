"""Exact match of a model on questions, with the context computed in full or chunk by chunk.

    full      every token sees everything before it: what a server without reuse computes
    shifted   every chunk sees the system prompt and itself only, at its true positions: reuse with position shift
    unshifted the same, but with the positions that chunks have right behind the system prompt: reuse without shift

The last two are what reuse without any recomputation gives; they check that a family probes what it is meant to
probe. Training never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmark.quality.question import Question
from benchmark.quality.synthetic.notes import Asked, Notes
from benchmark.quality.train.batches import IGNORED, batch_of, chunk_by_chunk
from benchmark.quality.train.hybrid import Hybrid
from benchmark.quality.train.model import Llama

MODES = ("full", "shifted", "unshifted")
BATCH_SIZE = 16


def exact_match(model: Llama | Hybrid, questions: Sequence[Question], mode: str = "full") -> float:
    """Share of questions whose whole answer and end token are the most likely tokens, one after the other.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}.")
    return sum(right_ones(model, questions, mode)) / len(questions)


@torch.no_grad()
def right_ones(model: Llama | Hybrid, questions: Sequence[Question], mode: str) -> list[bool]:
    """Whether each question is answered right."""
    right: list[bool] = []
    for start in range(0, len(questions), BATCH_SIZE):
        part = questions[start : start + BATCH_SIZE]
        prompts = [Notes(q.chunks, (Asked(q.family, q.question, q.answers[0]),)) for q in part]
        batch = batch_of(prompts)
        if mode != "full":
            batch = chunk_by_chunk(batch, prompts, shifted=mode == "shifted")
        hidden = model(batch.ids, batch.layout)[:, batch.first_target :]
        predicted = model.logits(hidden).argmax(-1)
        right += ((predicted == batch.targets) | (batch.targets == IGNORED)).all(dim=1).tolist()
    return right
