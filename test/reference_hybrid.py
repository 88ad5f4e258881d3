"""Reference of a small hybrid of states and attention: `Qwen3_5ForCausalLM` (text) in plain torch, on the CPU.

`server/test_states_server.py` compares servers with it, `unit/test_reference_hybrid.py` compares it with transformers.
All that it shares with what is tested is the rule of the states (`sglang_plain_cpu.delta_rule`).

- `random_hybrid(config, seed=...)` makes a model, `write_model` a Hugging Face folder of it, which `read_model` reads.
- `Prompt` computes a prompt of runs of tokens and of stored pieces, in order; one run is a plain causal forward.
  `Prompt.piece` is what some of its tokens leave. A piece was computed behind another context, and keeps its numbers.

Parameters have the names and layouts of transformers' class. Tensors have a batch of one prompt in front, as the rule
takes them. Nothing here needs gradients.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_plain_cpu.delta_rule import delta_rule, unit

TRAINED_DIR = Path(__file__).parents[1] / "benchmark" / "quality" / "models" / "qa-hybrid-1m-seed0"
"""A folder of the class: written ones have its settings but for sizes, and its tokenizer, whose tokens are words."""
NORM_EPS, ROPE_THETA, ROTARY_SHARE = 1e-6, 10000.0, 0.5  # as in its settings
WEIGHTS_FILE = "model.safetensors"
MEANS = {"linear_attn.norm": 0.3, "q_norm": 1.0, "k_norm": 1.0, "model.norm": -0.7}
"""Norms of a random model: what states answer does not drown the embeddings, and attention is peaked."""


@dataclass(frozen=True)
class HybridConfig:
    """Sizes: every `full_every`-th layer is attention; the others have states of [state_size, state_size]."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    full_every: int
    num_states: int
    state_size: int
    mlp_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    conv_size: int = 4  # tokens that the convolution in front of the states sees, its own among them

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


class Norm(nn.Module):
    """RMS norm over the last dimension, scaled by its weight plus `more`."""

    def __init__(self, size: int, more: float = 1.0) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.zeros(size)), more

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.more + self.weight, NORM_EPS)


Past = tuple[Tensor, Tensor]
"""What a layer has of the tokens before: see the methods `empty`."""
Kept = tuple[Tensor, ...]
"""What a layer keeps of a piece: see the methods `piece`."""


class StateLayer(nn.Module):
    """Gated delta rule behind a short convolution, with as many key heads as value heads."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.heads, self.size, self.tail = config.num_states, config.state_size, config.conv_size - 1
        width = self.heads * self.size
        self.in_proj_qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, width, bias=False)
        self.in_proj_a, self.in_proj_b = (nn.Linear(config.hidden_size, self.heads, bias=False) for _ in range(2))
        self.conv1d = nn.Conv1d(3 * width, 3 * width, config.conv_size, groups=3 * width, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(self.heads)) for _ in range(2))
        self.norm = Norm(self.size, more=0.0)
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)

    def empty(self) -> Past:
        """States [1, heads, state_size, state_size], and the last inputs of the convolution [1, tail, channels]."""
        states = torch.zeros(1, self.heads, self.size, self.size)
        return states, torch.zeros(1, self.tail, 3 * self.heads * self.size)

    def read(self, x: Tensor, tail: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """What the rule takes of `x` [1, tokens, hidden_size], and the inputs [1, tail + tokens, channels].

        The rule takes q, k, v [1, heads, tokens, state_size], and g and beta [1, heads, tokens].
        """
        inputs = torch.cat([tail, self.in_proj_qkv(x)], dim=1)
        parts = F.silu(self.conv1d(inputs.mT)).mT.chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, self.size)).transpose(1, 2) for part in parts)
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        return (unit(q), unit(k), v, g.mT, self.in_proj_b(x).sigmoid().mT), inputs

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Past]:
        """[1, tokens, hidden_size] of `x` of the same shape, and the past of what follows."""
        taken, inputs = self.read(x, past[1])
        out, states, _ = delta_rule(*taken, past[0])
        out = self.norm(out.transpose(1, 2)).flatten(2) * F.silu(self.in_proj_z(x))
        return self.out_proj(out), (states, inputs[:, -self.tail :])

    def piece(self, x: Tensor, start: int, end: int) -> Kept:
        """What tokens do to any states in front of them, turn @ states + adds, and their inputs of the convolution.

        `x` [1, tokens, hidden_size] begins with the first token of the prompt. `turn` and `adds` are
        [1, heads, state_size, state_size], the inputs [1, end - start, channels].
        """
        states, tail = self.empty()
        taken, inputs = self.read(x[:, :end], tail)
        q, k, v, g, beta = (each[:, :, start:] for each in taken)
        _, adds, _ = delta_rule(q, k, v, g, beta, states)
        _, turn, _ = delta_rule(q, k, torch.zeros_like(v), g, beta, states + torch.eye(self.size))
        return turn, adds, inputs[:, self.tail + start :]

    def behind(self, past: Past, kept: Kept) -> Past:
        """The past of what follows a piece."""
        turn, adds, inputs = kept
        return turn @ past[0] + adds, torch.cat([past[1], inputs], dim=1)[:, -self.tail :]


class Attention(nn.Module):
    """Attention with normed queries and keys, a part of each head rotated, and a gate on what it gives."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.num_kv_heads
        self.groups, self.rotary_dim = config.num_heads // self.kv_heads, int(self.head_dim * ROTARY_SHARE)
        q_size, kv_size = config.num_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * q_size, bias=False)  # of each head its query, then its gate
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, kv_size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (Norm(self.head_dim) for _ in range(2))

    def empty(self) -> Past:
        """Keys before rotation and values, each [1, kv heads, tokens, head_dim]."""
        none = torch.zeros(1, self.kv_heads, 0, self.head_dim)
        return none, none

    def rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """`x` [1, heads, tokens, head_dim] at `places` [tokens]; the halves of what is rotated are paired."""
        speeds = ROPE_THETA ** -(torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = (places[:, None] * speeds).repeat(1, 2)
        turned, rest = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([turned * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin(), rest], dim=-1)

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Past]:
        """[1, tokens, hidden_size] of `x` of the same shape, and the past of what follows."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        keys, values = past = self.behind(past, self.piece(x, 0, x.shape[1]))
        places = torch.arange(keys.shape[2])
        own = places[-x.shape[1] :]
        q, k = self.rotated(self.q_norm(q).transpose(1, 2), own), self.rotated(keys, places)
        k, v = (each.repeat_interleave(self.groups, dim=1) for each in (k, values))
        out = F.scaled_dot_product_attention(q, k, v, places <= own[:, None])
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2)), past

    def piece(self, x: Tensor, start: int, end: int) -> Kept:
        """Keys before rotation and values, [1, kv heads, end - start, head_dim], of some tokens of `x`."""
        k, v = (proj(x[:, start:end]).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return self.k_norm(k).transpose(1, 2), v.transpose(1, 2)

    def behind(self, past: Past, kept: Kept) -> Past:
        """The past of what follows a piece."""
        return torch.cat([past[0], kept[0]], dim=2), torch.cat([past[1], kept[1]], dim=2)


class MLP(nn.Module):
    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden_size, config.mlp_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.hidden_size) for _ in range(2))
        self.mlp = MLP(config)
        if config.is_full(index):
            self.self_attn = Attention(config)
        else:
            self.linear_attn = StateLayer(config)

    @property
    def mixer(self) -> StateLayer | Attention:
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn


class Hybrid(nn.Module):
    """Weights of a model; `Prompt` computes with them. The embedding is the output matrix as well."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config, self.model = config, nn.Module()  # its name stands in front of all parameters
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.model.norm = Norm(config.hidden_size)
        self.requires_grad_(False)


@dataclass(frozen=True)
class Run:
    """Tokens that are computed."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Reused:
    """A stored piece: what each layer keeps of it."""

    layers: Sequence[Kept]


class Prompt:
    """A prompt in parts; `logits` [computed tokens, vocab_size] are those of its runs."""

    def __init__(self, model: Hybrid, parts: Sequence[Run | Reused]) -> None:
        self.layers: Sequence[Layer] = model.model.layers
        self.parts = parts
        self.inputs: list[Tensor] = []  # of the mixer of each layer in each run, [1, tokens, hidden_size]
        pasts, logits = [layer.mixer.empty() for layer in self.layers], []
        for part in parts:
            if isinstance(part, Reused):
                pasts = [
                    layer.mixer.behind(*each) for layer, *each in zip(self.layers, pasts, part.layers, strict=True)
                ]
                continue
            x = model.model.embed_tokens(torch.tensor([list(part.ids)]))
            for index, layer in enumerate(self.layers):
                self.inputs.append(layer.input_layernorm(x))
                mixed, pasts[index] = layer.mixer(self.inputs[-1], pasts[index])
                x = x + mixed
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits.append(F.linear(model.model.norm(x)[0], model.model.embed_tokens.weight))
        self.logits = torch.cat(logits)

    def piece(self, start: int, end: int) -> Reused:
        """The tokens `start` to `end` of a prompt that is one run."""
        assert len(self.parts) == 1, "a prompt of several parts"
        return Reused([layer.mixer.piece(x, start, end) for layer, x in zip(self.layers, self.inputs, strict=True)])


def random_hybrid(config: HybridConfig, *, seed: int) -> Hybrid:
    """A model in which every weight matters; its states forget within one to a thousand tokens."""
    model, draw = Hybrid(config), torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            std = 0.3 if "embed" in name else 1.5 * weight[0].numel() ** -0.5
            nn.init.normal_(weight, std=std, generator=draw)
        elif name.endswith("A_log"):
            nn.init.uniform_(weight, 0.0, 2.0, generator=draw)
        elif name.endswith("dt_bias"):
            nn.init.uniform_(weight, -6.9, -2.3, generator=draw)  # logarithms of steps
            weight.copy_(weight.exp().expm1().log())
        else:
            mean = next((mean for norm, mean in MEANS.items() if name.endswith(f"{norm}.weight")), 0.0)
            nn.init.normal_(weight, mean, 0.05, generator=draw)
    return model


def write_model(model: Hybrid, folder: Path) -> None:
    """Weights in bf16, configuration and tokenizer, as SGLang and transformers load them."""
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.config
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [f"{'full' if config.is_full(n) else 'linear'}_attention" for n in range(config.num_layers)],
        "full_attention_interval": config.full_every,
        "linear_conv_kernel_dim": config.conv_size,
        "linear_key_head_dim": config.state_size,
        "linear_value_head_dim": config.state_size,
        "linear_num_key_heads": config.num_states,
        "linear_num_value_heads": config.num_states,
    }
    settings = json.loads((TRAINED_DIR / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | sizes), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TRAINED_DIR / name, folder)


def read_model(folder: Path, config: HybridConfig) -> Hybrid:
    """The weights of a folder as they were written, in fp32."""
    model = Hybrid(config)
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return model
