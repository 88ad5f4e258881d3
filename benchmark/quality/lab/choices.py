"""Choices: which reused tokens are recomputed, by rules that a server could follow.

The ratio counts the tokens of the reused chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from benchmark.quality.lab.case import Case, Judged
from benchmark.quality.lab.many import padded, run_many
from benchmark.quality.lab.rows import KV, Change

from chunk_cache.methods import METHODS
from chunk_cache.methods.base import AllReused
from sgl_kernel_ext.add_drift import PRIOR

BLOCK = 16
WORD_REACH = 8
"""Tokens on either side of a word of the question that its weight reaches, falling linearly."""


@dataclass(frozen=True)
class Pick:
    """What is recomputed.

    Attributes:
        rows: positions in the chunks, ascending.
        drift: strength of the mean change that the other tokens get.
        early: the first two layers are computed for all tokens.
    """

    rows: torch.Tensor
    drift: float = 0.0
    early: bool = False


@dataclass(frozen=True)
class Reused:
    """The reused part of a case and what can be known of it; scores are `[prompt_len]`.

    Attributes:
        first: the first chunk that is reused: those before it lie in the exact prefix.
        tails: ids of what other prompts ask, for rules that learn from other questions.
    """

    case: Case
    first: int = 1
    tails: Sequence[torch.Tensor] = ()

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
    def usual_mass(self) -> torch.Tensor:
        """What other questions attend to, mean over them, their rows, layers and heads."""
        found = torch.zeros(self.case.prompt_len)
        for tail in self.tails:
            mass = self.case.question_attention(tail).mean((0, 1))[: self.end]
            found[: self.end] += mass / len(tail) / len(self.tails)
        return found

    @cached_property
    def word_weights(self) -> torch.Tensor:
        """Rarity of the question's words among the chunks' tokens, where they stand and `WORD_REACH` around."""
        tokenizer = self.case.model.tokenizer
        words = [tokenizer.decode([token]).strip().lower() for token in self.case.ids.tolist()]
        counts = Counter(words[self.start : self.end])
        asked = {word for word in words[self.end :] if any(map(str.isalnum, word))}
        rarity = [
            math.log(1 + (self.end - self.start) / max(counts[word], 1)) if word in asked else 0.0 for word in words
        ]
        reach = 1 - torch.arange(-WORD_REACH, WORD_REACH + 1).abs() / (WORD_REACH + 1)
        spread = torch.nn.functional.conv1d(torch.tensor(rarity)[None, None], reach[None, None], padding=WORD_REACH)
        return spread[0, 0]

    @cached_property
    def early_change(self) -> torch.Tensor:
        """How far K and V of layer 1 lie from those of a full prefill: CacheBlend's score."""
        full, reused = self.case.full, self.case.reused
        return (full.k[1] - reused.k[1]).square().sum((1, 2)) + (full.v[1] - reused.v[1]).square().sum((1, 2))

    def num_rows(self, ratio: float) -> int:
        return max(1, math.ceil(ratio * (self.end - self.start)))

    def first_tokens(self, ratio: float) -> torch.Tensor:
        """EPIC's: the first tokens of each chunk."""
        return torch.cat([torch.arange(a, a + max(1, math.ceil(ratio * (b - a)))) for a, b in self.spans])

    def rows_of_all(self, method: str, ratio: float) -> torch.Tensor:
        """Those of a method of the server that looks at all chunks at once."""
        case, spans = self.case, self.spans
        rankings = case.model.words.rankings(case.ids.tolist(), case.spans, (self.end, case.prompt_len))
        ranking = np.concatenate(rankings[self.first :])
        rows = METHODS[method].rows_of_all(ratio, AllReused(spans, self.end, ranking=ranking))
        return torch.cat([torch.arange(start, end) for start, end in spans])[torch.from_numpy(rows)]

    def best_tokens(self, scores: torch.Tensor, ratio: float) -> torch.Tensor:
        order = torch.sort(scores[self.start : self.end], descending=True, stable=True).indices
        return (order[: self.num_rows(ratio)] + self.start).sort().values

    def best_pieces(self, scores: torch.Tensor, ratio: float, size: int | None = None) -> torch.Tensor:
        """Whole blocks of `size` tokens, or whole chunks, by their mean score; the last one is cut to the budget."""
        pieces = [(a, min(b, a + (size or b))) for start, b in self.spans for a in range(start, b, size or b)]
        return self.first_of(sorted(pieces, key=lambda piece: -float(scores[slice(*piece)].mean())), ratio)

    def first_of(self, pieces: Sequence[tuple[int, int]], ratio: float) -> torch.Tensor:
        taken, num = [], self.num_rows(ratio)
        for start, end in pieces:
            taken.append(torch.arange(start, min(end, start + num)))
            num -= len(taken[-1])
        return torch.cat(taken).sort().values

    def with_drift(self, rows: torch.Tensor, strength: float = 0.5) -> dict[str, Any]:
        """Arguments of `Case.judge`."""
        change_each = self._drift([Pick(rows, strength)], rows[None])

        def change(layer: int, cache: KV, k: torch.Tensor, v: torch.Tensor) -> None:
            change_each(layer, KV(cache.k[:, None], cache.v[:, None]), k[None], v[None])

        return {"rows": rows, "change": change}

    def arguments(self, pick: Pick) -> dict[str, Any]:
        """What `Case.judge` takes."""
        found = self.with_drift(pick.rows, pick.drift) if pick.drift else {"rows": pick.rows}
        if pick.early:
            found["cache"] = self.case.reused.clone()
            found["cache"].k[:2], found["cache"].v[:2] = self.case.full.k[:2], self.case.full.v[:2]
        return found

    @torch.no_grad()
    def judge(self, picks: Sequence[Pick]) -> list[Judged]:
        """As `Case.judge(**self.arguments(pick))` of each, side by side."""
        case, num = self.case, len(picks)
        model, prompt_len = case.model, case.prompt_len
        unused = prompt_len + max(len(case.gold), len(case.own))  # where shorter picks are filled up
        shape = (model.num_layers, num, unused + 1, model.num_kv_heads, model.head_dim)
        cache = KV(torch.zeros(shape), torch.zeros(shape))
        for part, reused, full in ((cache.k, case.reused.k, case.full.k), (cache.v, case.reused.v, case.full.v)):
            part[:, :, : self.end] = reused[:, None, : self.end]
            for i, pick in enumerate(picks):
                if pick.early:
                    part[:2, i, : self.end] = full[:2, : self.end]
        rows = padded([pick.rows for pick in picks], unused)
        positions = torch.cat([rows, torch.arange(self.end, prompt_len).expand(num, -1)], 1)
        ids = torch.nn.functional.pad(case.ids, (0, unused + 1 - prompt_len))[positions]
        change = self._drift(picks, rows) if any(pick.drift for pick in picks) else None
        hidden = run_many(model, cache, ids, positions, prompt_len, change=change)[:, -1:]
        states = []
        for answer in (case.gold, case.own):
            states.append(hidden)
            if len(answer) > 1:
                where = torch.arange(prompt_len, prompt_len + len(answer) - 1).expand(num, -1)
                read = run_many(model, cache, answer[:-1].expand(num, -1), where, prompt_len + len(answer) - 1)
                states[-1] = torch.cat([hidden, read], 1)
        return [case.judged(*(model.log_probs(one[i]) for one in states), len(p.rows)) for i, p in enumerate(picks)]

    def _drift(self, picks: Sequence[Pick], rows: torch.Tensor) -> Change:
        """`sgl_kernel_ext.add_drift` in this instrument, of every pick its own strength.

        Args:
            rows: `[num_picks, longest]`, positions; from the prompt's end on they are none.
        """
        model, width = self.case.model, rows.shape[1]
        starts = torch.tensor([start for start, _ in self.spans])
        tokens = torch.arange(self.start, self.end)
        token_chunk, row_chunk = (torch.bucketize(at, starts, right=True) - 1 for at in (tokens, rows))
        is_row = rows < self.case.prompt_len
        is_of = (row_chunk[:, None] == torch.arange(len(starts))[None, :, None]) & is_row[:, None]
        usual = is_row[:, None] * (PRIOR / is_row.sum(1).clamp_min(1)[:, None, None])
        strengths = torch.tensor([pick.drift for pick in picks])[:, None, None]
        weights = (is_of + usual) / (is_of.sum(2, keepdim=True) + PRIOR) * strengths
        at, each = torch.where(is_row, rows, 0), torch.arange(len(picks))[:, None]
        is_other = torch.ones(len(picks), self.case.prompt_len + 1)
        is_other[each, rows.clamp_max(self.case.prompt_len)] = 0.0
        is_other = is_other[:, self.start : self.end, None, None]

        def change(layer: int, cache: KV, k: torch.Tensor, v: torch.Tensor) -> None:
            drift_k = model.turn_to(k[:, :width] - cache.k[layer][each, at], -at, layer)
            drift_v = v[:, :width] - cache.v[layer][each, at]
            mean_k, mean_v = (torch.einsum("bcr,brhd->bchd", weights, drift) for drift in (drift_k, drift_v))
            cache.k[layer][:, self.start : self.end] += model.turn_to(mean_k[:, token_chunk], tokens, layer) * is_other
            cache.v[layer][:, self.start : self.end] += mean_v[:, token_chunk] * is_other

        return change


Rule = Callable[[Reused, float], Pick]
"""`rule(reused, ratio)`."""


def _by(scores: Callable[[Reused], torch.Tensor], drift: float = 0.0) -> Rule:
    """The tokens of the largest scores, computed with or without drift."""
    return lambda reused, ratio: Pick(reused.best_tokens(scores(reused), ratio), drift)


def _mean_of_layers(share: float) -> Callable[[Reused], torch.Tensor]:
    """The question's attention, mean over this share of the layers, from the first on."""
    return lambda reused: reused.question_mass[: math.ceil(share * len(reused.question_mass))].mean(0)


def _near_words(scores: Callable[[Reused], torch.Tensor], weight: float = 4.0) -> Callable[[Reused], torch.Tensor]:
    """Scores that rise by up to `weight` times at words of the question."""

    def risen(reused: Reused) -> torch.Tensor:
        words = reused.word_weights
        return scores(reused) * (1 + weight * words / max(float(words[reused.start : reused.end].max()), 1e-9))

    return risen


def _usual(reused: Reused) -> torch.Tensor:
    return reused.usual_mass


RULES: Mapping[str, Rule] = {
    "nothing": lambda reused, _: Pick(torch.arange(0)),
    "epic": lambda reused, ratio: Pick(reused.first_tokens(ratio)),
    "epic-drift": lambda reused, ratio: Pick(reused.first_tokens(ratio), 0.5),
    "near": lambda reused, ratio: Pick(reused.rows_of_all("near", ratio)),
    "near-drift": lambda reused, ratio: Pick(reused.rows_of_all("near", ratio), 0.5),
    "near-words": lambda reused, ratio: Pick(reused.rows_of_all("near-words", ratio)),
    "random": _by(lambda reused: torch.rand(reused.case.prompt_len, generator=_draw(reused.case))),
    "cacheblend": lambda reused, ratio: Pick(reused.best_tokens(reused.early_change, ratio), early=True),
    "fusionrag": _by(lambda reused: reused.question_mass[-1]),
    "question": _by(_mean_of_layers(1.0)),
    "question-drift": _by(_mean_of_layers(1.0), 0.5),
    "question-drift, a quarter of the layers": _by(_mean_of_layers(0.25), 0.5),
    "question, blocks of 16": lambda reused, r: Pick(reused.best_pieces(reused.question_mass.mean(0), r, BLOCK)),
    "question, whole passages": lambda reused, r: Pick(reused.best_pieces(reused.question_mass.mean(0), r)),
    "usual": _by(_usual),
    "usual-drift": _by(_usual, 0.5),
    "words": _by(lambda reused: reused.word_weights),
    "words-drift": _by(lambda reused: reused.word_weights, 0.5),
    "usual-words": _by(_near_words(_usual)),
    "usual-words-drift": _by(_near_words(_usual), 0.5),
    "usual-words x16-drift": _by(_near_words(_usual, 16.0), 0.5),
}
"""What a server could follow. `usual` are the tokens that other questions attend to most, `words` those at words of the
question: both are known before the forward, as with `epic`."""


def _draw(case: Case) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(int(case.ids.sum()))
