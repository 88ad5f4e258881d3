"""A decoder in numpy fp64, slow and obvious: what a forward over a cache should give, whichever rows run.

- `Decoder` reads a model folder and computes one layer of some rows.
- `Forward` takes rows through the layers over a cache, and lets rows leave between two layers.

The cache holds K and V as they are, or rounded to FP8.

Shares nothing with the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array: TypeAlias = npt.NDArray[np.float64]

FP8 = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}
"""Bits of the mantissa, and the exponent of the smallest normal number."""


class Decoder:
    """A decoder of class Llama, Mistral, Qwen2, Qwen3 or GptOss, alone or in a class that sees images.

    Args:
        kv_dtype: of the cache, one of `FP8`; None = exact.
        scales: per layer, what K and V are divided by before they are rounded.
    """

    def __init__(
        self, folder: Path, kv_dtype: str | None = None, scales: Sequence[tuple[float, float]] | None = None
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        stored = load_file(folder / "model.safetensors")
        first = next(name for name in stored if name.endswith("embed_tokens.weight"))
        start = first.removesuffix("embed_tokens.weight")
        self._weights: dict[str, Array] = {}
        for name, value in stored.items():
            own = f"model.{name.removeprefix(start)}" if name.startswith(start) else name
            self._weights[own.removeprefix("language_model.")] = value.astype(np.float64)
        kinds = config.get("layer_types") or []
        self._windows = [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
        self._num_chosen: int = config.get("num_experts_per_tok", 0)
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        self._inv_freq, self._magnitude = _rope(folder, config["rope_parameters"], self.head_dim)
        self._kv_dtype, self._scales = kv_dtype, scales or [(1.0, 1.0)] * self.num_layers

    def embed(self, ids: Sequence[int]) -> Array:
        return self._weights["model.embed_tokens.weight"][np.asarray(ids)]

    def project(self, layer: int, x: Array, positions: npt.NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Q, K (both rotated) and V of rows: `[num_rows, num_heads or num_kv_heads, head_dim]`."""
        normed = self._norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (
            self._linear(normed, f"model.layers.{layer}.self_attn.{name}_proj").reshape(len(x), -1, self.head_dim)
            for name in "qkv"
        )
        if f"model.layers.{layer}.self_attn.q_norm.weight" in self._weights:
            q = self._norm(q, f"model.layers.{layer}.self_attn.q_norm")
            k = self._norm(k, f"model.layers.{layer}.self_attn.k_norm")
        return self.rotate(q, positions) * self._magnitude, self.rotate(k, positions) * self._magnitude, v

    def rotate(self, values: Array, positions: npt.NDArray[np.int64]) -> Array:
        """Rotary embedding: dimension i and i + head_dim / 2 turn by position * inv_freq_i."""
        angles = positions[:, None, None] * self._inv_freq
        first, second = np.split(values, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def stored(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """K and V as the cache holds them."""
        if self._kv_dtype is None:
            return k, v
        k_scale, v_scale = self._scales[layer]
        return _rounded(k / k_scale, self._kv_dtype) * k_scale, _rounded(v / v_scale, self._kv_dtype) * v_scale

    def weights(
        self, layer: int, q: Array, positions: npt.NDArray[np.int64], k: Array, *, in_window: bool = False
    ) -> Array:
        """softmax(q k) over the keys at or before each row's position: `[num_rows, num_heads, num_keys]`.

        Those of the layer's window, if it has one and `in_window`; methods score without.
        """
        k = np.repeat(k, self.num_heads // self.num_kv_heads, axis=1)
        logits = np.einsum("rhd,khd->rhk", q, k) / math.sqrt(self.head_dim)
        distance = positions[:, None] - np.arange(len(k))
        window = self.window(layer) if in_window else None
        is_seen = (distance >= 0) & (distance < (window or math.inf))
        logits = np.where(is_seen[:, None, :], logits, -np.inf)
        sinks = self._weights.get(f"model.layers.{layer}.self_attn.sinks", np.full(self.num_heads, -np.inf))[:, None]
        top = np.maximum(logits.max(axis=-1, keepdims=True), sinks)
        exp = np.exp(logits - top)
        return exp / (exp.sum(axis=-1, keepdims=True) + np.exp(sinks - top))

    def window(self, layer: int) -> int | None:
        """How many positions a row of a layer sees; None = all."""
        return self._windows[layer] if self._windows else None

    def finish(self, layer: int, x: Array, weights: Array, v: Array) -> Array:
        """The rows behind this layer."""
        v = np.repeat(v, self.num_heads // self.num_kv_heads, axis=1)
        attended = np.einsum("rhk,khd->rhd", weights, v).reshape(len(x), -1)
        x = x + self._linear(attended, f"model.layers.{layer}.self_attn.o_proj")
        normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm")
        if f"model.layers.{layer}.mlp.router.weight" in self._weights:
            return x + self._experts(layer, normed)
        gate, up = (self._linear(normed, f"model.layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(gate / (1 + np.exp(-gate)) * up, f"model.layers.{layer}.mlp.down_proj")

    def _experts(self, layer: int, x: Array) -> Array:
        """Those of gpt-oss: each row's best, weighed among each other."""
        name = f"model.layers.{layer}.mlp.experts."
        into, into_bias, out, out_bias = (
            self._weights[name + part] for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        logits, result = self._linear(x, f"model.layers.{layer}.mlp.router"), np.zeros_like(x)
        for row, of_row in enumerate(logits):
            chosen = np.argsort(-of_row, kind="stable")[: self._num_chosen]
            shares = np.exp(of_row[chosen] - of_row.max())
            for expert, share in zip(chosen, shares / shares.sum(), strict=True):
                both = x[row] @ into[expert] + into_bias[expert]
                gate, up = np.minimum(both[::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
                inner = (up + 1.0) * gate / (1.0 + np.exp(-1.702 * gate))
                result[row] += share * (inner @ out[expert] + out_bias[expert])
        return result

    def log_probs(self, x: Array) -> Array:
        """`[vocabulary]` for one row behind the last layer."""
        logits = self._norm(x, "model.norm") @ self._weights["lm_head.weight"].T
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0.0)

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._eps) * self._weights[f"{name}.weight"]


def _rounded(values: Array, dtype: str) -> Array:
    """To the nearest number of a dtype of FP8; ties go to the even one."""
    num_bits, smallest = FP8[dtype]
    _, exponent = np.frexp(values)  # of a fraction in [0.5, 1)
    step = np.ldexp(1.0, np.maximum(exponent - 1, smallest) - num_bits)
    return np.rint(values / step) * step


def _rope(folder: Path, parameters: dict[str, Any], head_dim: int) -> tuple[Array, float]:
    """Inverse frequencies, and the factor on Q and K; scaled types by Hugging Face's own functions."""
    if parameters["rope_type"] == "default":
        return parameters["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](AutoConfig.from_pretrained(folder), "cpu")
    return inv_freq.double().numpy(), float(magnitude)


class Forward:
    """Rows of one prompt on their way through the layers; the cache holds every other position that they see."""

    def __init__(self, model: Decoder, ids: Sequence[int], k: Array, v: Array, rows: Sequence[int]) -> None:
        """
        Args:
            k, v: `[num_layers, prompt_len, num_kv_heads, head_dim]`, overwritten at the rows; NaN where nothing is.
            rows: prompt positions, ascending, with the last one.
        """
        self.model, self.k, self.v = model, k, v
        self.rows = np.asarray(rows, dtype=np.int64)
        self.layer = 0
        self._x = model.embed(np.asarray(ids)[self.rows])

    def project(self) -> tuple[Array, Array, Array]:
        """Q, K, V of the current rows at the current layer."""
        return self.model.project(self.layer, self._x, self.rows)

    @property
    def positions(self) -> frozenset[int]:
        """The current rows."""
        return frozenset(self.rows.tolist())

    def drop(self, positions: frozenset[int]) -> None:
        """These rows leave; from this layer on the cache keeps what it holds of them."""
        is_kept = ~np.isin(self.rows, list(positions))
        self.rows, self._x = self.rows[is_kept], self._x[is_kept]

    def attend(self) -> Array:
        """Runs the current layer and goes to the next one; returns what methods score, as `Decoder.weights`."""
        q, k, v = self.project()
        self.k[self.layer, self.rows], self.v[self.layer, self.rows] = self.model.stored(self.layer, k, v)
        k, v = self.k[self.layer], self.v[self.layer]
        weights = self.model.weights(self.layer, q, self.rows, k, in_window=True)
        self._x = self.model.finish(self.layer, self._x, weights, v)
        scored = weights if self.model.window(self.layer) is None else self.model.weights(self.layer, q, self.rows, k)
        self.layer += 1
        return scored

    def log_probs(self) -> Array:
        return self.model.log_probs(self._x[-1])
