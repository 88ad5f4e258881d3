"""RowModel: a pretrained model that computes chosen rows of a prompt over a KV cache that one may change.

The instrument behind `storing.py`. It runs the modules of a Hugging Face model of Llama's shape (Llama,
Qwen2, Qwen3, Mistral) or of Gemma 3 one layer at a time, outside any server, so that an experiment can put any K and V
in front of any row:

    cache = KV.empty(model, 1000)
    model.run(cache, ids, positions)        # computes rows, writes their K and V, returns their hidden states
    cache.k[layer, position]                # and whatever an experiment wants to do with it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from chunk_cache.plan.question_words import QuestionWords

Observer = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`observe(layer, q, k)`: rotated, `[num_rows, num_heads, head_dim]` and `[kv_len, num_kv_heads, head_dim]`."""


Change = Callable[[int, "KV", torch.Tensor, torch.Tensor], None]
"""`change(layer, cache, k, v)`: may change the cache before the rows' new K and V are written into it."""


@dataclass
class KV:
    """K (rotated) and V of a prompt, `[num_layers, capacity, num_kv_heads, head_dim]`, by position."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def empty(cls, model: RowModel, capacity: int) -> KV:
        shape = (model.num_layers, capacity, model.num_kv_heads, model.head_dim)
        return cls(torch.zeros(shape), torch.zeros(shape))

    def clone(self) -> KV:
        return KV(self.k.clone(), self.v.clone())


class RowModel:
    """See the head of this file. fp32, no gradients of weights, on torch's default device.

    Args:
        folder: Hugging Face folder or name.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.requires_grad_(False).eval().to(torch.get_default_device())
        self._layers = self._model.model.layers
        config = self._model.config
        self.num_layers = len(self._layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads)
        # `softmax_attention` divides by the root of the head's size; where the model does not, queries make up for it.
        self._q_scale = float(self._layers[0].self_attn.scaling) * self.head_dim**0.5
        is_mixed = getattr(config, "sliding_window", None) and "sliding_attention" in (config.layer_types or ())
        self._kinds = list(config.layer_types) if is_mixed else [None] * self.num_layers
        self._window = int(config.sliding_window) if is_mixed else None

    @cached_property
    def words(self) -> QuestionWords:
        return QuestionWords.of(self.tokenizer, len(self.tokenizer))

    def run(
        self,
        cache: KV,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        observe: Observer | None = None,
        change: Change | None = None,
    ) -> torch.Tensor:
        """Computes rows over the cache and writes their K and V into it; each row sees all positions up to its own.

        Args:
            ids, positions: `[num_rows]` int64, positions ascending.
            change: called at every layer once its K and V are known.
            bias: `[num_rows, kv_len]`, added to the scaled scores of attention.

        Returns:
            Hidden states behind the last norm, `[num_rows, hidden_size]`.
        """
        kv_len = int(positions[-1]) + 1
        masks = self.masks(positions, kv_len)
        x = self.embed(ids)
        rotations = self.rotations(positions)
        for index in range(self.num_layers):
            kind = self.kind(index)
            q, k, v = self.project(index, x, *rotations[kind])
            mask = masks[kind]
            if change is not None:
                change(index, cache, k, v)
            cache.k[index, positions], cache.v[index, positions] = k, v
            keys, values = cache.k[index, :kv_len], cache.v[index, :kv_len]
            if observe is not None:
                observe(index, q, keys)
            x = self.finish(index, x, softmax_attention(q, keys, values, mask if bias is None else mask + bias))
        return self.norm(x)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, vocab_size]`."""
        return self._model.lm_head(hidden).log_softmax(-1)

    def turn(self, k: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
        """K of all layers `[num_layers, len, num_kv_heads, head_dim]` as it would be `by` positions later.

        Args:
            by: for all tokens, or `[len]` for each its own.
        """
        places = by if isinstance(by, torch.Tensor) else torch.full((k.shape[-3],), by)
        return torch.stack([self.turn_to(one, places, layer) for layer, one in enumerate(k)])

    def turn_to(self, k: torch.Tensor, by: torch.Tensor, layer: int) -> torch.Tensor:
        """K of a layer `[..., len, num_kv_heads, head_dim]` turned by `[..., len]` positions, each by its own."""
        cos, sin = self._rotation(by.abs(), self._kinds[layer])
        return _rotate(k, cos, sin * by.sign()[..., None, None])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.model.embed_tokens(ids)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.model.norm(x)

    def kind(self, layer: int) -> str | None:
        """Which of `masks` and `rotations` a layer takes."""
        return self._kinds[layer]

    def rotations(self, positions: torch.Tensor) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines `[..., 1, head_dim]` of positions `[...]`, by kind of layer."""
        return {kind: self._rotation(positions, kind) for kind in set(self._kinds)}

    def masks(self, positions: torch.Tensor, kv_len: int) -> dict[str | None, torch.Tensor]:
        """`[..., num_rows, kv_len]` by kind of layer, added to the scaled scores."""
        distance = positions[..., None] - torch.arange(kv_len)
        unseen = {kind: distance < 0 for kind in set(self._kinds)}
        if self._window is not None:
            # A row that is computed for nothing lies behind all keys; it must see one.
            unseen["sliding_attention"] |= (distance >= self._window) & (positions < kv_len)[..., None]
        return {kind: torch.zeros(far.shape).masked_fill_(far, float("-inf")) for kind, far in unseen.items()}

    def project(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q and K, rotated, and V of a layer, `[..., num_heads, head_dim]`, of its inputs `[..., hidden_size]`."""
        attention, normed = self._layers[layer].self_attn, self._layers[layer].input_layernorm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return _rotate(q, cos, sin) * self._q_scale, _rotate(k, cos, sin), v

    def finish(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Outputs of a layer `[..., hidden_size]` from its inputs and what attention gave."""
        block = self._layers[layer]
        attended = block.self_attn.o_proj(attended.flatten(-2))
        if hasattr(block, "pre_feedforward_layernorm"):
            x = x + block.post_attention_layernorm(attended)
            return x + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))
        x = x + attended
        return x + block.mlp(block.post_attention_layernorm(x))

    def _rotation(self, positions: torch.Tensor, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = () if kind is None else (kind,)
        cos, sin = self._model.model.rotary_emb(torch.zeros(1), positions.reshape(1, -1), *kinds)
        shape = (*positions.shape, 1, -1)
        return cos.reshape(shape), sin.reshape(shape)


def attention_of(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Weights of attention `[num_heads, num_rows, kv_len]` of rows at `positions`."""
    num_heads, head_dim = q.shape[1:]
    keys = k.transpose(0, 1).repeat_interleave(num_heads // k.shape[1], 0)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * head_dim**-0.5
    unseen = torch.arange(k.shape[0])[None, :] > positions[:, None]
    return scores.masked_fill_(unseen, float("-inf")).softmax(-1)


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of q `[num_rows, num_heads, head_dim]` over k and v `[kv_len, num_kv_heads, head_dim]`.

    `mask` `[num_rows, kv_len]` is added to the scaled scores. All may have one more dimension in front.
    """
    q, k, v = (part.transpose(-3, -2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(-3), enable_gqa=True).transpose(-3, -2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
