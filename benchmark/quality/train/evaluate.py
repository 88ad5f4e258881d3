"""Exact match of a model on questions, with the context computed in full or chunk by chunk.

    full      every token sees everything before it: what a server without reuse computes
    shifted   every chunk sees the system prompt and itself only, at its true positions: reuse with position shift
    unshifted the same, but with the positions that chunks have right behind the system prompt: reuse without shift

The last two are what reuse without any recomputation gives; they check that a family probes what it is meant to
probe. Training never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from benchmark.quality.question import Question
from benchmark.quality.synthetic.notes import Asked, Notes
from benchmark.quality.synthetic.vocabulary import SYSTEM
from benchmark.quality.train.batches import IGNORED, Batch, batch_of
from benchmark.quality.train.model import Llama
from torch import Tensor

MODES = ("full", "shifted", "unshifted")
SYSTEM_LEN = len(SYSTEM.split()) + 1  # with the beginning-of-sequence token
BATCH_SIZE = 16


def exact_match(model: Llama, questions: Sequence[Question], mode: str = "full") -> float:
    """Share of questions whose whole answer and end token are the most likely tokens, one after the other.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}.")
    return sum(right_ones(model, questions, mode)) / len(questions)


@torch.no_grad()
def right_ones(model: Llama, questions: Sequence[Question], mode: str) -> list[bool]:
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


def chunk_by_chunk(batch: Batch, prompts: Sequence[Notes], *, shifted: bool) -> Batch:
    """The same batch, with every context row seeing the system prompt and its own chunk only."""
    n = batch.layout.context_len
    owners = torch.full((len(prompts), n), -1)  # number of the chunk a context row belongs to, -1 for the system
    positions = batch.layout.positions.clone()
    for row, notes in enumerate(prompts):
        start = SYSTEM_LEN
        for index, chunk in enumerate(notes.chunks):
            chunk_len = len(chunk.split())
            owners[row, start : start + chunk_len] = index
            if not shifted:
                positions[row, start : start + chunk_len] = torch.arange(SYSTEM_LEN, SYSTEM_LEN + chunk_len)
            start += chunk_len
    is_system = torch.arange(n) < SYSTEM_LEN
    sees = ((owners[:, :, None] == owners[:, None, :]) | is_system).tril()
    return replace(batch, layout=replace(batch.layout, positions=positions, context_mask=_additive(sees[:, None])))


def _additive(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape).masked_fill_(~sees, float("-inf"))
