"""Choices: which reused tokens are recomputed, by rules that a server could follow and by oracles that it could not.

The first chunk lies in the exact prefix, as in the server; the ratio counts the tokens of the others. The oracles see
what a full prefill gives: they say what a ratio could do at best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.rows import KV, Change

from sglang_chunk_cache.forward.selection.drift import PRIOR

BLOCK = 16


@dataclass(frozen=True)
class Reused:
    """The reused part of a case and what can be known of it; scores are `[prompt_len]`.

    `first` is the first chunk that is reused: those before it lie in the exact prefix.
    """

    case: Case
    supporting: Sequence[int] = ()
    first: int = 1

    @property
    def spans(self) -> list[tuple[int, int]]:
        return self.case.spans[self.first :]

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.case.tail_start

    @cached_property
    def question_mass(self) -> torch.Tensor:
        """`[num_layers, prompt_len]`, mean over heads."""
        return self.case.question_attention().mean(1)

    @cached_property
    def gradient(self) -> torch.Tensor:
        """How much of the own answer's loss a token explains, by `Case.attribution`; without its sign."""
        return self.case.attribution().sum((0, 1, 3)).abs()

    def num_rows(self, ratio: float) -> int:
        return max(1, math.ceil(ratio * (self.end - self.start)))

    def best_tokens(self, scores: torch.Tensor, num: int) -> torch.Tensor:
        order = torch.sort(scores[self.start : self.end], descending=True, stable=True).indices
        return (order[:num] + self.start).sort().values

    def best_pieces(self, scores: torch.Tensor, num: int, size: int | None = None) -> torch.Tensor:
        """Whole blocks of `size` tokens, or whole chunks, by their mean score; the last one is cut to the budget."""
        pieces = [(a, min(b, a + (size or b))) for start, b in self.spans for a in range(start, b, size or b)]
        return self.first_of(sorted(pieces, key=lambda piece: -float(scores[slice(*piece)].mean())), num)

    def first_of(self, pieces: Sequence[tuple[int, int]], num: int) -> torch.Tensor:
        taken = []
        for start, end in pieces:
            taken.append(torch.arange(start, min(end, start + num)))
            num -= len(taken[-1])
        return torch.cat(taken).sort().values

    def drift(self, rows: torch.Tensor, strength: float = 0.5) -> Change:
        """`sglang_chunk_cache.forward.selection.drift` in this instrument."""
        model = self.case.model
        is_other = torch.zeros(self.case.prompt_len, dtype=torch.bool)
        is_other[self.start : self.end] = True
        is_other[rows] = False
        others = is_other.nonzero()[:, 0]
        starts = torch.tensor([start for start, _ in self.spans])
        row_chunk, other_chunk = (torch.bucketize(positions, starts, right=True) - 1 for positions in (rows, others))
        is_of = row_chunk[None] == torch.arange(len(starts))[:, None]
        weights = (is_of + PRIOR / len(rows)) / (is_of.sum(1, keepdim=True) + PRIOR) * strength

        def change(layer: int, cache: KV, k: torch.Tensor, v: torch.Tensor) -> None:
            num = len(rows)
            drift_k = model.turn_to(k[:num] - cache.k[layer, rows], -rows, layer)
            drift_v = v[:num] - cache.v[layer, rows]
            mean_k, mean_v = (torch.einsum("cr,rhd->chd", weights, drift) for drift in (drift_k, drift_v))
            cache.k[layer, others] += model.turn_to(mean_k[other_chunk], others, layer)
            cache.v[layer, others] += mean_v[other_chunk]

        return change


def choices(case: Case, supporting: Sequence[int], ratio: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `Case.judge`) of every rule at a ratio; `supporting` chunks hold the answer."""
    reused = Reused(case, supporting)
    num = reused.num_rows(ratio)
    epic = torch.cat([torch.arange(a, a + max(1, math.ceil(ratio * (b - a)))) for a, b in reused.spans])
    asked = reused.question_mass.mean(0)
    yield "epic", {"rows": epic}
    yield "epic, drift", {"rows": epic, "change": reused.drift(epic)}
    yield "random", {"rows": reused.best_tokens(torch.rand(case.prompt_len, generator=_draw(case)), num)}
    yield "fusionrag", {"rows": reused.best_tokens(reused.question_mass[-1], num)}
    tokens = reused.best_tokens(asked, num)
    yield "question, all layers", {"rows": tokens}
    yield "question, all layers, whole drift", {"rows": tokens, "change": reused.drift(tokens, strength=1.0)}
    yield "question, blocks of 16", {"rows": reused.best_pieces(asked, num, BLOCK)}
    yield "question, whole passages", {"rows": reused.best_pieces(asked, num)}
    yield "question-drift", {"rows": tokens, "change": reused.drift(tokens)}
    gradient = reused.gradient
    oracle = reused.best_tokens(gradient, num)
    yield "oracle: tokens by gradient", {"rows": oracle}
    yield "oracle: tokens by gradient, drift", {"rows": oracle, "change": reused.drift(oracle)}
    yield "oracle: blocks of 16 by gradient", {"rows": reused.best_pieces(gradient, num, BLOCK)}
    yield "oracle: passages by gradient", {"rows": reused.best_pieces(gradient, num)}
    passages = [case.spans[i] for i in supporting if i > 0]
    if passages:
        yield "supporting passages", {"rows": reused.first_of(passages, num)}


def best_passages(case: Case, ratio: float) -> dict[str, Any]:
    """Oracle: whole passages by what recomputing each alone does to the own answer, tried one by one."""
    reused = Reused(case)
    losses = {span: case.judge(torch.arange(*span)).own_loss for span in reused.spans}
    return {"rows": reused.first_of(sorted(losses, key=lambda span: losses[span]), reused.num_rows(ratio))}


def _draw(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(int(case.ids.sum()))
