"""A small hybrid of gated delta rule and attention: the architecture of `Qwen3_5ForCausalLM` (text), in plain torch.

Three of four layers keep a state instead of KV; `sglang_plain_cpu.delta_rule` has the rule, and serves such models.
Parameters have the names and layouts of transformers' class; `test/unit/quality/test_hybrid.py` compares the logits.
The forward takes the same `Layout` as `model.Llama`, so both are trained by the same program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmark.quality.train.model import MLP, Attention, Layout, Llama, ModelConfig, RMSNorm, rotary_table, rotate
from torch import Tensor, nn

from sglang_plain_cpu.delta_rule import delta_rule, unit

EMBEDDING = 0.3  # standard deviation of an untrained embedding


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    """Every `full_every`-th layer is attention; the others have `num_states` states of [state_size, state_size]."""

    num_layers: int = 8
    mlp_size: int = 256
    full_every: int = 4
    num_states: int = 4
    state_size: int = 32
    conv_size: int = 4
    rotary_share: float = 0.5

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True)
class Mixed:
    """What a layer with a state reads of its tokens: [batch, heads, length, size] and [batch, heads, length]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, rows: slice) -> Mixed:
        """Some tokens side by side."""
        return Mixed(*(x[:, :, rows] for x in (self.q, self.k, self.v, self.g, self.beta)))

    def rows(self, index: Tensor) -> Mixed:
        """The tokens `index` [batch, blocks, length] of each sample, -1 for none: [batch * blocks, heads, ...]."""
        batch, blocks, length = index.shape
        taken = index.clamp(min=0).view(batch, 1, -1)

        def take(x: Tensor) -> Tensor:
            at = taken.expand(-1, x.shape[1], -1)
            at = at[..., None].expand(*at.shape, x.shape[3]) if x.ndim == 4 else at
            x = x.gather(2, at).unflatten(2, (blocks, length))
            return x.transpose(1, 2).flatten(0, 1)

        is_none = (index < 0).view(batch * blocks, 1, length)
        q, k, v, g, beta = (take(x) for x in (self.q, self.k, self.v, self.g, self.beta))
        return Mixed(q, k, v, g.masked_fill(is_none, 0.0), beta.masked_fill(is_none, 0.0))

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [batch, heads, length, size] and the state after the last token, from `state` [batch, heads, ...]."""
        out, last, _ = delta_rule(self.q, self.k, self.v, self.g, self.beta, state)
        return out, last


class ZeroNorm(nn.Module):
    """RMS norm whose weight is what is added to 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1.0 + self.weight, self.eps)


class GatedNorm(RMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * F.silu(gate)


class StateLayer(nn.Module):
    """Gated delta rule behind a short convolution, as in `Qwen3_5GatedDeltaNet`; as many key as value heads."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.heads, self.size, self.tail = config.num_states, config.state_size, config.conv_size - 1
        width = self.heads * self.size
        self.conv1d = nn.Conv1d(3 * width, 3 * width, config.conv_size, groups=3 * width, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.size, config.norm_eps)
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.in_proj_qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, width, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.heads, bias=False)

    def convolved(self, inputs: Tensor) -> Tensor:
        """[batch, length, channels] of [batch, tail + length, channels]: every token sees `tail` tokens before it."""
        return F.silu(self.conv1d(inputs.mT)).mT

    def mixed(self, x: Tensor, convolved: Tensor) -> Mixed:
        """Keys, values, decays and steps of `x` [batch, length, hidden], `convolved` [batch, length, channels]."""
        q, k, v = (part.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for part in convolved.chunk(3, dim=-1))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        return Mixed(unit(q), unit(k), v, g.mT, self.in_proj_b(x).sigmoid().mT)

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        """[batch, length, hidden] of what the states answered, [batch, heads, length, size]."""
        out = self.norm(out.transpose(1, 2), self.in_proj_z(x).unflatten(-1, (self.heads, self.size)))
        return self.out_proj(out.flatten(2))

    def empty_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, self.heads, self.size, self.size, device=self.A_log.device)

    def forward(self, x: Tensor, layout: Layout, sees: Tensor) -> Tensor:
        """`sees` [batch, length, tail]: the rows that the convolution sees in front of each row (`rows_before`)."""
        n, batch = layout.context_len, x.shape[0]
        inputs = self.in_proj_qkv(x)
        if layout.chunks is not None:  # many rows do not continue the row in front of them
            convolved = self._conv_rows(inputs, sees)
        else:
            convolved = self.convolved(F.pad(inputs[:, :n], (0, 0, self.tail, 0)))
            if layout.blocks is not None:
                convolved = torch.cat([convolved, self._conv_rows(inputs, sees[:, n:])], dim=1)
        mixed = self.mixed(x, convolved)
        context = torch.arange(n, device=x.device).expand(batch, 1, n)
        if layout.blocks is not None:
            lens = layout.positions[:, n, None, None]  # where questions begin: the context without its padding
            context = context.masked_fill(context >= lens, -1)
        out, state = mixed.rows(context).run(self.empty_state(batch))
        out = torch.cat([out, torch.zeros_like(mixed.v[:, :, n:])], dim=2)
        if layout.chunks is not None:  # chunks that do not see each other, behind the same system prompt
            first = int(layout.chunks[0, 0, 0])
            _, start = mixed.rows(context[:, :, :first]).run(self.empty_state(batch))
            out = _scatter(out, layout.chunks, mixed.rows(layout.chunks), start)
        if layout.blocks is not None:
            out = _scatter(out, layout.blocks, mixed.rows(layout.blocks), state)
        return self.output(x, out)

    def _conv_rows(self, inputs: Tensor, sees: Tensor) -> Tensor:
        """The convolution of the last rows, each over the rows `sees` [batch, rows, tail] and itself, -1 for zeros."""
        weight = self.conv1d.weight[:, 0]
        out = inputs[:, -sees.shape[1] :] * weight[:, -1]
        for place in range(self.tail):
            at = sees[:, :, place, None]
            seen = inputs.gather(1, at.clamp(min=0).expand(-1, -1, inputs.shape[2]))
            out = out + seen.masked_fill(at < 0, 0.0) * weight[:, place]
        return F.silu(out)


def _scatter(out: Tensor, index: Tensor, mixed: Mixed, state: Tensor) -> Tensor:
    """`out` [batch, heads, length, size] with the rows `index` [batch, blocks, rows] run from each sample's `state`."""
    batch, blocks = index.shape[:2]
    answered, _ = mixed.run(state.repeat_interleave(blocks, dim=0))
    answered = answered.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)
    # rows of no block write into one row more than there are
    at = torch.where(index < 0, out.shape[2], index).view(batch, 1, -1, 1).expand_as(answered)
    padded = torch.cat([out, torch.zeros_like(out[:, :, :1])], dim=2)
    return padded.scatter(2, at, answered)[:, :, :-1]


def rows_before(layout: Layout, shape: tuple[int, int], tail: int) -> Tensor:
    """[batch, length, tail]: the `tail` rows in front of each row of what it continues, the nearest last; -1 for none.

    A question continues the context; a chunk that sees no other one continues the system prompt.
    """
    batch, length = shape
    device = layout.positions.device
    back = torch.arange(-tail, 0, device=device)
    sees = (torch.arange(length + 1, device=device)[:, None] + back).clamp(min=-1).repeat(batch, 1, 1)
    for index in (layout.chunks, layout.blocks):
        if index is None:
            continue
        # questions begin at the position where their context ends
        ends = layout.positions[:, layout.context_len] if index is layout.blocks else index[:, 0, 0]
        front = (ends[:, None, None] + back).expand(-1, index.shape[1], -1)
        windows = torch.cat([front, index], dim=-1).unfold(-1, tail, 1)[:, :, : index.shape[2]]
        at = torch.where(index < 0, length, index).view(batch, -1, 1).expand(-1, -1, tail)
        sees.scatter_(1, at, windows.flatten(1, 2))
    return sees[:, :-1]


class GatedAttention(Attention):
    """Attention with normed queries and keys, rotary embedding of a part of each head, and a gate on its output."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.rotary_dim = config.rotary_dim
        # a head's query and its gate stand side by side
        self.q_proj = nn.Linear(config.hidden_size, 2 * config.num_heads * config.head_dim, bias=False)
        self.q_norm, self.k_norm = (ZeroNorm(config.head_dim, config.norm_eps) for _ in range(2))

    def _query_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        return query, gate

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        return self.q_norm(self._query_and_gate(x)[0]).transpose(1, 2), self.k_norm(k), v

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        return torch.cat([rotate(turned, cos, sin), rest], dim=-1)

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        return self.o_proj((out.transpose(1, 2) * self._query_and_gate(x)[1].sigmoid()).flatten(2))


class HybridLayer(nn.Module):
    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.is_full = config.is_full(index)
        self.input_layernorm, self.post_attention_layernorm = (
            ZeroNorm(config.hidden_size, config.norm_eps) for _ in range(2)
        )
        if self.is_full:
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = StateLayer(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, sees: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin, layout) if self.is_full else self.linear_attn(normed, layout, sees))
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridDecoder(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, index) for index in range(config.num_layers))
        self.norm = ZeroNorm(config.hidden_size, config.norm_eps)


class Hybrid(nn.Module):
    def __init__(self, config: HybridConfig, generator: torch.Generator) -> None:
        """Weights are drawn from `generator` as those of `model.Llama`; states begin with memories of 1 to 1000 tokens.

        In layer 0, half of the heads start by answering with what stood one and two tokens before (`look_back`), and
        the first attention layer with one head that copies (`copy_what_followed`).
        """
        super().__init__()
        self.config = config
        self.model = HybridDecoder(config)
        for name, weight in self.named_parameters():
            if weight.ndim >= 2:
                std = EMBEDDING if "embed" in name else weight[0].numel() ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
                if "down_proj" in name or ("layers.0." not in name and ("o_proj" in name or "out_proj" in name)):
                    nn.init.zeros_(weight)
        for layer in self.model.layers:
            if not layer.is_full:
                mixer = layer.linear_attn
                steps = torch.exp(torch.empty(config.num_states).uniform_(-6.9, -2.3, generator=generator))
                nn.init.uniform_(mixer.A_log, 0.0, 2.0, generator=generator)
                nn.init.constant_(mixer.norm.weight, EMBEDDING)  # else what is written drowns the embedding
                with torch.no_grad():
                    mixer.dt_bias.copy_(steps.expm1().log())
            else:  # scores up to 22; with norms of 1, up to 5.7, no head can look at one token of 200
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    nn.init.ones_(norm.weight)
        nn.init.constant_(self.model.norm.weight, 0.1 / EMBEDDING - 1.0)  # logits begin as small as a Llama's
        look_back(self.model)
        copy_what_followed(self.model, config)

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states [batch, length, hidden_size] of `ids` [batch, length]; see `logits`."""
        cos, sin = rotary_table(layout.positions, self.config)
        x, sees = self.model.embed_tokens(ids), rows_before(layout, ids.shape, self.config.conv_size - 1)
        for layer in self.model.layers:
            x = layer(x, cos, sin, layout, sees)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab_size] of [..., hidden_size], with the embedding as output matrix."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def make_model(config: ModelConfig, generator: torch.Generator) -> Llama | Hybrid:
    """A fresh model of the kind that a configuration is of."""
    return Hybrid(config, generator) if isinstance(config, HybridConfig) else Llama(config, generator)


@torch.no_grad()
def look_back(model: HybridDecoder) -> None:
    """Makes head h of layer 0 answer with the value h + 1 tokens before, for half of the heads.

    Such a head forgets at once, so its state holds one value: the convolution moves it, and query and key are alike.
    All embeddings get the same value in feature 0, which holds the gates of these heads open.
    """
    layer = model.layers[0].linear_attn
    model.embed_tokens.weight[:, 0] = 4 * EMBEDDING
    width = layer.heads * layer.size
    for head in range(layer.heads // 2):
        own = slice(head * layer.size, (head + 1) * layer.size)
        q, k, v = (slice(part * width + own.start, part * width + own.stop) for part in range(3))
        layer.in_proj_qkv.weight[k] = layer.in_proj_qkv.weight[q]
        layer.in_proj_qkv.weight[v, 0] = 0.0
        layer.conv1d.weight[q] = layer.conv1d.weight[k] = layer.conv1d.weight[v] = 0.0
        layer.conv1d.weight[q, 0, -1] = layer.conv1d.weight[k, 0, -1] = layer.conv1d.weight[v, 0, -2 - head] = 1.0
        layer.in_proj_z.weight[own] *= 0.1
        layer.in_proj_z.weight[own, 0] = 0.5
        layer.A_log[head], layer.dt_bias[head] = 2.0, 1.0  # a decay of about exp(-10)


@torch.no_grad()
def copy_what_followed(model: HybridDecoder, config: HybridConfig) -> None:
    """Makes the first attention head write the token that followed an earlier place of its own token.

    Its key reads what head 0 of `look_back` wrote, its query the same of its own token, both in the half that is not
    rotated; what it writes is what its value reads. Left to itself a model of this size had not learnt to copy after
    400 steps, where one with attention only had.
    """
    first, attention = model.layers[0].linear_attn, model.layers[config.full_every - 1].self_attn
    head, plain = slice(0, config.head_dim), slice(config.rotary_dim, config.head_dim)
    width = first.heads * first.size
    attention.q_proj.weight[head] = attention.k_proj.weight[head] = 0.0
    attention.q_proj.weight[plain] = first.in_proj_qkv.weight[2 * width :][plain]
    attention.k_proj.weight[plain] = first.out_proj.weight[:, plain].T
    attention.o_proj.weight[:, head] = attention.v_proj.weight[head].T
