"""Passages put together from stored pieces, in a model with states and in one with attention only.

A piece is what a passage leaves behind from its token `skip` on: keys and values of attention layers, and of a layer
with a state the map that the passage applies to it, S -> A S + B, with the last rows in front of the convolution. A
prompt is computed from runs of tokens and stored pieces, in order (HYPIC, 2607.01299, calls the run in front of a piece
its seam). What a piece was computed behind is another context, so its numbers are those of that context.

`Prompt` computes one, `Prompt.stored` and `Stored.piece` give what its passages leave, `mean_of` takes a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from benchmark.quality.train.hybrid import Hybrid, Mixed, StateLayer
from benchmark.quality.train.model import Attention, Llama, rotary_table
from torch import Tensor


@dataclass(frozen=True)
class Carried:
    """What one state layer keeps of a piece.

    Attributes:
        turn: # [heads, key size, key size], A
        adds: # [heads, key size, value size], B
        tail: # [rows in front of the convolution, channels], the last ones
        decay: # [heads, 1, 1], what is left of a state that no token overwrites
    """

    turn: Tensor
    adds: Tensor
    tail: Tensor
    decay: Tensor


@dataclass(frozen=True)
class Seen:
    """Keys before rotation and values of one attention layer, each [kv heads, tokens, head_dim]."""

    k: Tensor
    v: Tensor


Layer = Carried | Seen
KINDS: dict[str, Callable[[Carried], Carried]] = {
    "operator": lambda kept: kept,
    "bf16": lambda kept: replace(kept, turn=_in_bf16(kept.turn), adds=_in_bf16(kept.adds)),
    "decay": lambda kept: replace(kept, turn=kept.decay * torch.eye(kept.turn.shape[-1])),
    "none": lambda kept: replace(kept, turn=torch.zeros_like(kept.turn)),
}
"""How the map of a piece is kept: A and B in fp32, both in bf16, A as its decay alone, and without A."""


def _in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@dataclass(frozen=True)
class Stored:
    """A passage as one prompt computed it: the inputs of its layers' states and its keys and values, of every token.

    `outside` is how much of its attention went to other passages, mean over heads and tokens, summed over layers. It
    ranks whole passages here as CCI does in Cache-Craft (2502.15734, eq. 9).
    """

    mixed: dict[int, Mixed]
    inputs: dict[int, Tensor]
    seen: dict[int, Seen]
    size: int
    outside: float

    def piece(self, skip: int) -> list[Layer]:
        """What is kept of the tokens from `skip` on, a layer after the other."""
        return [
            _carried(self.mixed[index], self.inputs[index], skip)
            if index in self.mixed
            else Seen(self.seen[index].k[:, skip:], self.seen[index].v[:, skip:])
            for index in range(len(self.mixed) + len(self.seen))
        ]


def _carried(mixed: Mixed, inputs: Tensor, skip: int) -> Carried:
    rest = mixed.part(slice(skip, None))
    heads, size = rest.k.shape[1], rest.k.shape[3]
    _, adds = rest.run(torch.zeros(1, heads, size, rest.v.shape[3]))
    _, turn = replace(rest, v=torch.zeros_like(rest.k)).run(torch.eye(size).expand(1, heads, -1, -1))
    return Carried(turn[0], adds[0], inputs[skip:], rest.g.sum(-1)[0, :, None, None].exp())


def mean_of(pieces: Sequence[list[Layer]]) -> list[Layer]:
    """The mean over contexts: of keys in the passage's own frame, values, maps and rows."""
    means: list[Layer] = []
    for layers in zip(*pieces, strict=True):
        kind = type(layers[0])
        every = ([getattr(layer, field.name) for layer in layers] for field in fields(kind))
        means.append(kind(*(torch.stack(values).mean(0) for values in every)))
    return means


@dataclass(frozen=True)
class Run:
    """Tokens that are computed."""

    ids: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Reused:
    """A stored piece and the number of its tokens."""

    layers: Sequence[Layer]
    size: int


Part = Run | Reused


class Prompt:
    """One prompt in parts; `hidden` [1, computed tokens, hidden_size] is the model's output of its runs.

    `watches`: whether `shares` keeps where attention goes, [computed tokens, tokens] of each attention layer.
    """

    def __init__(self, model: Hybrid | Llama, parts: Sequence[Part], *, watches: bool = False) -> None:
        self.model, self.watches = model, watches
        self.places_of: list[tuple[Part, slice]] = []
        """Each part with its tokens: of a run among the computed ones, of a piece in the prompt."""
        self.shares: list[Tensor] = []
        self.mixed: dict[int, Mixed] = {}
        self.inputs: dict[int, Tensor] = {}
        self.seen: dict[int, Seen] = {}
        places, start = [], 0
        for part in parts:
            before = len(places) if isinstance(part, Run) else start
            self.places_of.append((part, slice(before, before + part.size)))
            if isinstance(part, Run):
                places += range(start, start + part.size)
            start += part.size
        self.places, self.size = torch.tensor(places), start
        self.cos, self.sin = rotary_table(torch.arange(start)[None], model.config)
        self.mask = (torch.arange(start) <= self.places[:, None])[None, None]
        ids = torch.tensor([token for part in parts if isinstance(part, Run) for token in part.ids])
        x = model.model.embed_tokens(ids)[None]
        for index, layer in enumerate(model.model.layers):
            normed = layer.input_layernorm(x)
            mixer = getattr(layer, "linear_attn", None) or layer.self_attn
            kept = self._states if isinstance(mixer, StateLayer) else self._attention
            x = x + mixer.output(normed, kept(index, mixer, normed))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.hidden = model.model.norm(x)

    def _attention(self, index: int, layer: Attention, x: Tensor) -> Tensor:
        q, k, v = layer.project(x)
        self.seen[index] = Seen(k[0], v[0])
        all_k, all_v = (part.new_empty(1, part.shape[1], self.size, part.shape[3]) for part in (k, v))
        all_k[:, :, self.places], all_v[:, :, self.places] = k, v
        for part, places in self.places_of:
            if isinstance(part, Reused):
                all_k[0, :, places], all_v[0, :, places] = part.layers[index].k, part.layers[index].v
        q = layer.rotated(q, self.cos[:, :, self.places], self.sin[:, :, self.places])
        all_k = layer.rotated(all_k, self.cos, self.sin)
        if self.watches:
            scores = q @ all_k.repeat_interleave(layer.num_groups, dim=1).mT * layer.head_dim**-0.5
            self.shares.append(scores.masked_fill(~self.mask, float("-inf")).softmax(-1)[0].mean(0))
        return layer.attend(q, all_k, all_v, self.mask)

    def _states(self, index: int, layer: StateLayer, x: Tensor) -> Tensor:
        inputs = layer.in_proj_qkv(x)
        state, tail = layer.empty_state(1), inputs.new_zeros(1, layer.tail, inputs.shape[2])
        outs, convolved = [], []
        for part, rows in self.places_of:
            new = part.layers[index].tail[None] if isinstance(part, Reused) else inputs[:, rows]
            window = torch.cat([tail, new], dim=1)
            if isinstance(part, Run):
                convolved.append(layer.convolved(window))
            tail = window[:, -layer.tail :]
        self.inputs[index], self.mixed[index] = inputs[0], layer.mixed(x, torch.cat(convolved, dim=1))
        for part, rows in self.places_of:
            if isinstance(part, Reused):
                state = part.layers[index].turn @ state + part.layers[index].adds
            else:
                out, state = self.mixed[index].part(rows).run(state)
                outs.append(out)
        return torch.cat(outs, dim=2)

    def stored(self, first: int, size: int, system: int = 0) -> Stored:
        """The tokens `first` to `first + size` of a prompt that is one run and begins with `system` shared tokens."""
        rows = slice(first, first + size)
        outside = [share[rows, system:first].sum(-1).mean().item() for share in self.shares]
        mixed = {index: kept.part(rows) for index, kept in self.mixed.items()}
        seen = {index: Seen(kept.k[:, rows], kept.v[:, rows]) for index, kept in self.seen.items()}
        return Stored(mixed, {index: kept[rows] for index, kept in self.inputs.items()}, seen, size, sum(outside))


def answered(prompt: Prompt, answer: Sequence[int]) -> tuple[bool, float]:
    """Whether the last run of a prompt, which ends with `answer`, predicts every token of it; and nats a token."""
    logits = prompt.model.logits(prompt.hidden[0, -len(answer) - 1 : -1])
    wanted = torch.tensor(list(answer))
    return bool((logits.argmax(-1) == wanted).all()), F.cross_entropy(logits, wanted).item()
