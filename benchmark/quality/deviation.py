"""Deviation: how far the stored KV of chunks lies from that of a full prefill, at the model's second layer.

`measure_deviation` gives one `Deviation` per prompt: of chunks computed alone behind the system prompt, and of chunks
prepared behind their neighbours (FusionRAG figures 3 and 7; CacheBlend's deviation, of K and V together). Runs the
first two layers with transformers: K of the first depends on token and position only, so behind a neighbour's stored KV
the second layer is what it is in one prefill of system prompt, neighbours and chunk. K is compared before its rotation,
which is the same on both sides once the stored one is turned to its new position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark.quality.neighbourhood import Neighbours
from benchmark.quality.prompts import Prompt

LAYER = 1
"""The second layer; at the first nothing deviates."""


@dataclass(frozen=True)
class Deviation:
    """Of one prompt, means over the tokens of all chunks but the first, which lies in the exact prefix.

    Attributes:
        alone, prepared: |K - K_full, V - V_full|, the Euclidean norm per token.
        alone_squared, prepared_squared: the square of that norm (FusionRAG eq. 7).
    """

    alone: float
    prepared: float
    alone_squared: float
    prepared_squared: float


def measure_deviation(model: str | Path, prompts: Sequence[Prompt], neighbours: Neighbours) -> Iterator[Deviation]:
    """One after the other; a prompt of a single chunk has none and is left out."""
    second = _SecondLayer(model)
    alone: dict[tuple[str, str], torch.Tensor] = {}
    prepared: dict[tuple[str, str], torch.Tensor] = {}
    for prompt in prompts:
        full = second.of([prompt.head, *prompt.chunks])[1:]
        norms: dict[str, list[torch.Tensor]] = {"alone": [], "prepared": []}
        for chunk, exact in list(zip(prompt.chunks, full, strict=True))[1:]:
            key = prompt.partition, chunk
            if key not in alone:
                near = neighbours[prompt.partition][chunk]
                alone[key] = second.of([prompt.head, chunk])[-1]
                prepared[key] = second.of([prompt.head, *near, chunk])[-1] if near else alone[key]
            norms["alone"].append((alone[key] - exact).norm(dim=1))
            norms["prepared"].append((prepared[key] - exact).norm(dim=1))
        if norms["alone"]:
            of_tokens = {name: torch.cat(parts) for name, parts in norms.items()}
            squares = {f"{name}_squared": float(one.square().mean()) for name, one in of_tokens.items()}
            yield Deviation(**{name: float(one.mean()) for name, one in of_tokens.items()}, **squares)


def reduction(before_and_after: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """By how much preparation lowers a mean, as a share, with a 95 % interval from resampling the prompts."""
    pairs = np.array(before_and_after)

    def share(rows: Any) -> float:
        sums = pairs[rows].sum(axis=0)
        return float(1.0 - sums[1] / sums[0])

    draw = np.random.default_rng(0)
    shares = [share(draw.integers(0, len(pairs), len(pairs))) for _ in range(2000)]
    low, high = np.quantile(shares, (0.025, 0.975))
    return share(slice(None)), float(low), float(high)


class _SecondLayer:
    """K and V of a model's second layer, K before its rotation."""

    def __init__(self, model: str | Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds of imports, so only where it is needed

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
        decoder.layers = decoder.layers[: LAYER + 1]
        self._decoder = decoder.to(self._device).eval()
        self._found: dict[str, torch.Tensor] = {}
        attention = decoder.layers[LAYER].self_attn
        for name, module in (("k", getattr(attention, "k_norm", attention.k_proj)), ("v", attention.v_proj)):
            module.register_forward_hook(lambda _module, _args, output, name=name: self._found.update({name: output}))

    @torch.inference_mode()
    def of(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        """`[tokens, K and V of all heads]` of each piece of a prompt, each tokenized by itself, the first with BOS."""
        ids = [self._tokenizer(piece, add_special_tokens=i == 0)["input_ids"] for i, piece in enumerate(pieces)]
        self._decoder(torch.tensor([list(chain.from_iterable(ids))], device=self._device), use_cache=False)
        both = torch.cat([self._found[name][0].flatten(start_dim=1) for name in ("k", "v")], dim=1)
        return list(both.cpu().split([len(piece) for piece in ids]))
