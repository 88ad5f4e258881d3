"""Llama: the architecture of Hugging Face's `LlamaForCausalLM`, small, in plain torch, for many questions per prompt.

Parameters have the names and layouts of `LlamaForCausalLM`, so `state_dict()` is what the export writes, and
`test/unit/quality/test_train.py` compares the logits. Rows of a batch are one context followed by question blocks;
`Layout` says who sees whom. Rotary embedding: Su et al., RoFormer (2021), in the half-split ("neox") layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama with tied embeddings; `hidden_size` is split evenly over `num_heads`."""

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_size: int = 320
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True)
class Layout:
    """Positions, and what the question rows may see.

    Attributes:
        context_len: the first rows of every sample are its context.
        positions: # [batch, length], int64; lengths of context and questions together.
        question_mask: # [batch, 1, length - context_len, length], 0 where a question row sees, -inf where not.
            None when there are no question rows.
        context_mask: # [batch, 1, context_len, context_len], the same for context rows; None is causal. For
            chunks that do not see each other.
        blocks: # [batch, questions, rows], int64, the rows of each question, -1 behind the last; None for no questions.
        chunks: # [batch, chunks, rows], int64, the same for chunks that do not see each other; else None.
    """

    context_len: int
    positions: Tensor
    question_mask: Tensor | None
    context_mask: Tensor | None = None
    blocks: Tensor | None = None
    chunks: Tensor | None = None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_heads // config.num_kv_heads
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.keep_seen = False  # whether the last forward leaves its rotated queries and keys in `seen`
        self.seen: tuple[Tensor, Tensor] | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before rotation, each [batch, heads, length, head_dim]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in projections)
        return q, k, v

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, heads, length, head_dim] of rotated queries over keys and values of the KV heads; None is causal."""
        k, v = (x.repeat_interleave(self.num_groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        """[batch, length, hidden_size] of what `attend` gave for the layer's input `x`."""
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        self.seen = (q, k) if self.keep_seen else None
        n = layout.context_len
        out = self.attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], layout.context_mask)
        if layout.question_mask is not None:
            out = torch.cat([out, self.attend(q[:, :, n:], k, v, layout.question_mask)], dim=2)
        return self.output(x, out)

    def first_head_logits(self, layout: Layout) -> Tensor:
        """Scores of the question rows of head 0 in the last forward, -inf where unseen: [batch, rows, length]."""
        assert self.seen is not None, "keep_seen was off"
        q, k = (x[:, 0] for x in self.seen)
        scores = q[:, layout.context_len :] @ k.mT * self.head_dim**-0.5
        return scores + layout.question_mask[:, 0]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids to normed hidden states; called `model` as in `LlamaForCausalLM`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, layout)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        """Weights are drawn from `generator`: normal, standard deviation 1/sqrt(inputs), 0.1 for embeddings.

        Matrices that write into the residual stream start at zero, but for the attention of layer 0, where half of
        the heads start by looking one and two tokens back (`look_back`): induction heads form upon it.
        """
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.1 if "embed" in name else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
                if "down_proj" in name or ("o_proj" in name and "layers.0." not in name):
                    nn.init.zeros_(weight)
        look_back(self.model, config)

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states [batch, length, hidden_size] of `ids` [batch, length]; see `logits`."""
        cos, sin = rotary_table(layout.positions, self.config)
        return self.model(ids, cos, sin, layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab_size] of [..., hidden_size], with the embedding as output matrix."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def rotary_table(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [batch, 1, length, rotary_dim], of positions [batch, length]."""
    steps = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-steps / config.rotary_dim)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, length, rotary_dim], halves paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@torch.no_grad()
def look_back(model: Decoder, config: ModelConfig) -> None:
    """Makes head h of layer 0 attend about h + 1 places back, for the heads that share the first KV head.

    All embeddings get the same value in feature 0. Queries and keys that only depend on it, in the fastest rotary
    pairs, have scores that only depend on the distance; a query rotated by h + 1 places peaks at that distance.
    """
    shared, strength, num_pairs = 0.4, 1.5, min(6, config.head_dim // 2)
    attention = model.layers[0].self_attn
    model.embed_tokens.weight[:, 0] = shared
    keys = torch.zeros(config.head_dim)
    keys[:num_pairs] = strength
    attention.k_proj.weight[: config.head_dim] *= 0.1
    attention.k_proj.weight[: config.head_dim, 0] = keys
    for head in range(config.num_heads // config.num_kv_heads):
        cos, sin = rotary_table(torch.tensor([[-(head + 1)]]), config)
        rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
        attention.q_proj.weight[rows] *= 0.1
        attention.q_proj.weight[rows, 0] = rotate(keys[None, None, None], cos, sin).flatten()
