"""Case: one question as token ids, with the KV of a full prefill, that of reused chunks, and the answers to judge by.

    [ head | chunk 1 | chunk 2 | ... | tail ] answer
      exact  computed alone behind the head,   computed behind whatever the experiment left in front
             turned to where it stands

`Case.build` computes both caches; `Case.judge` computes chosen rows of the chunks and the tail over a cache and says
what that does to the answers. Both answers are judged token by token: the right one (`gold`) and the one that the full
prefill gives itself (`own`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from benchmark.quality.lab.many import behind
from benchmark.quality.lab.rows import KV, Change, RowModel, attention_of
from benchmark.quality.prompts import Prompt


@dataclass(frozen=True)
class Judged:
    """What a condition does to the answers.

    Attributes:
        gold_loss, own_loss: nats per token that the answer is less likely than behind the full prefill.
        first_kl: KL(full || this) of the first token, nats.
        own_kl: the same, mean over the tokens of the full prefill's own answer.
        gold_found, own_kept: 1 where each token of the answer is the likeliest behind those before it, else 0: a greedy
            reply would begin with the right answer, or be full prefill's own.
        recomputed: share of the chunks' tokens that were computed.
    """

    gold_loss: float
    own_loss: float
    first_kl: float
    own_kl: float
    gold_found: float
    own_kept: float
    recomputed: float


@dataclass
class Case:
    """See the head of this file; positions are those of the prompt, caches have room for the answers."""

    model: RowModel
    ids: torch.Tensor  # [prompt_len]
    spans: list[tuple[int, int]]  # of the chunks
    gold: torch.Tensor
    own: torch.Tensor
    full: KV
    reused: KV
    full_gold: torch.Tensor  # log-probabilities [len(gold)] of the tokens
    full_own: torch.Tensor  # [len(own), vocab_size]
    full_finds: bool  # each token of gold is the likeliest

    @property
    def prompt_len(self) -> int:
        return len(self.ids)

    @property
    def head_len(self) -> int:
        return self.spans[0][0]

    @property
    def tail_start(self) -> int:
        return self.spans[-1][1]

    @property
    def num_chunk_tokens(self) -> int:
        return self.tail_start - self.head_len

    @classmethod
    @torch.no_grad()
    def build(cls, model: RowModel, prompt: Prompt, *, own_len: int) -> Case:
        """Args:
        own_len: tokens of the full prefill's own answer, at most.
        """
        ids, spans = _tokens(model, prompt)
        gold = _ids(model, prompt.answer)
        full = KV.empty(model, len(ids) + max(own_len, len(gold)))
        hidden = model.run(full, ids, torch.arange(len(ids)))[-1:]
        own, full_own = _greedy(model, full, hidden, len(ids), own_len)
        found = _read(model, full.clone(), hidden, gold, len(ids))
        full_gold, full_finds = found.gather(1, gold[:, None])[:, 0], bool((found.argmax(1) == gold).all())
        reused = full.clone()
        head_len = spans[0][0]
        head, nothing = KV(full.k[:, :head_len], full.v[:, :head_len]), [ids[:0]] * len(spans)
        for (start, end), alone in zip(spans, behind(model, head, nothing, [ids[a:b] for a, b in spans]), strict=True):
            reused.k[:, start:end] = model.turn(alone.k, start - head_len)
            reused.v[:, start:end] = alone.v
        reused.k[:, spans[-1][1] :], reused.v[:, spans[-1][1] :] = 0, 0
        return cls(model, ids, spans, gold, own, full, reused, full_gold, full_own, full_finds)

    @torch.no_grad()
    def judge(
        self,
        rows: torch.Tensor,
        *,
        cache: KV | None = None,
        change: Change | None = None,
    ) -> Judged:
        """Computes `rows` (positions in the chunks, ascending) and the tail over a copy of `cache`.

        Args:
            cache: that of the reused chunks where it is left out.
            change: see `RowModel.run`.
        """
        kv = (self.reused if cache is None else cache).clone()
        positions = torch.cat([rows, torch.arange(self.tail_start, self.prompt_len)])
        hidden = self.model.run(kv, self.ids[positions], positions, change=change)[-1:]
        gold = _read(self.model, kv, hidden, self.gold, self.prompt_len)
        own = _read(self.model, kv, hidden, self.own, self.prompt_len)
        return self.judged(gold, own, len(rows))

    def judged(self, gold: torch.Tensor, own: torch.Tensor, num_rows: int) -> Judged:
        """Args:
        gold, own: log-probabilities `[len(answer), vocab_size]` behind the condition.
        """
        kl = (self.full_own.exp() * (self.full_own - own)).sum(1)
        token = self.own[:, None]
        return Judged(
            gold_loss=float((self.full_gold - gold.gather(1, self.gold[:, None])[:, 0]).mean()),
            own_loss=float((self.full_own.gather(1, token) - own.gather(1, token)).mean()),
            first_kl=float(kl[0]),
            own_kl=float(kl.mean()),
            gold_found=float((gold.argmax(1) == self.gold).all()),
            own_kept=float((own.argmax(1) == self.own).all()),
            recomputed=num_rows / self.num_chunk_tokens,
        )

    @torch.no_grad()
    def question_attention(self, tail: torch.Tensor | None = None) -> torch.Tensor:
        """What the tail attends to over the reused cache, `[num_layers, num_heads, len]`: sums over its rows.

        Args:
            tail: ids of another question in the place of the prompt's own.
        """
        ids = self.ids[self.tail_start :] if tail is None else tail
        positions = torch.arange(self.tail_start, self.tail_start + len(ids))
        cache = KV(*(with_room(part[:, : self.tail_start], len(ids)) for part in (self.reused.k, self.reused.v)))
        found: list[torch.Tensor] = []

        def observe(layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
            found.append(attention_of(q, k, positions).sum(1))

        self.model.run(cache, ids, positions, observe=observe)
        return torch.stack(found)


def with_room(part: torch.Tensor, num: int) -> torch.Tensor:
    """KV `[num_layers, len, ...]` with `num` more places."""
    return torch.cat([part, part.new_zeros((part.shape[0], num, *part.shape[2:]))], 1)


def _tokens(model: RowModel, prompt: Prompt) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Ids piece by piece, as a server tokenizes marked prompts, and the spans of the chunks."""
    pieces = [_ids(model, text) for text in (prompt.head, *prompt.chunks, prompt.tail)]
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    return torch.cat(pieces), list(itertools.pairwise(ends[:-1]))


def _ids(model: RowModel, text: str) -> torch.Tensor:
    return torch.tensor(model.tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


def _greedy(
    model: RowModel, cache: KV, hidden: torch.Tensor, start: int, max_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own answer `[len]` up to its end of text, and the distributions it was drawn from `[len, vocab]`."""
    tokens, rows = [], []
    for step in range(max_len):
        rows.append(model.log_probs(hidden)[0])
        tokens.append(int(rows[-1].argmax()))
        if tokens[-1] == model.tokenizer.eos_token_id or step == max_len - 1:
            break
        hidden = model.run(cache, torch.tensor(tokens[-1:]), torch.tensor([start + step]))
    return torch.tensor(tokens), torch.stack(rows)


def _read(model: RowModel, cache: KV, hidden: torch.Tensor, answer: torch.Tensor, start: int) -> torch.Tensor:
    """Distributions `[len(answer), vocab]` of an answer's tokens behind the prompt whose last state is `hidden`."""
    if len(answer) > 1:
        positions = torch.arange(start, start + len(answer) - 1)
        hidden = torch.cat([hidden, model.run(cache, answer[:-1], positions)])
    return model.log_probs(hidden)
