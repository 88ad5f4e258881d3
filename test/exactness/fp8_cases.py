"""Keys that were moved, every method, and scales, on a KV cache in FP8, as scenarios for `exactness.runner`.

`scaled` gives a case scales, `differences` says how far two replies are apart, `assert_near` how far they may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from chunk_cache.methods import METHODS
from exactness import cases, selection_cases
from exactness.cases import Session
from exactness.selection_cases import SELECTING
from local_scheduler import Reply

__all__ = ["CASES", "Session", "assert_near", "differences", "scaled", "scales_of"]

TOLERANCE, USUAL = 0.1, 1e-4
"""Of log-probabilities in fp32, and of nine in ten of them."""


class MovedKeys(NamedTuple):
    """Of one layer, `[num_tokens, num_kv_heads, head_dim / 2]`: for each pair of dimensions that turn together.

    Attributes:
        error: distance between the pair that was moved and the one that the model computes there.
        size: length of the latter.
    """

    error: np.ndarray
    size: np.ndarray


def case_moved_keys(s: Session, shift: int) -> list[MovedKeys]:
    """Keys of a prompt, moved by so many positions, beside those that the model computes there; layer by layer."""
    from sglang_chunk_cache.start.model_check import _Check

    chunks, found = s.local.cache.chunks, []
    check = _Check(s.local.scheduler, chunks, 128)
    try:
        check.compute()
        moved, there = check.moved_keys(shift)
        for mine, expected in zip(moved, there.keys, strict=True):
            error, size = (one.unflatten(-1, (2, -1)).norm(dim=-2).numpy() for one in (mine - expected, expected))
            found.append(MovedKeys(error, size))
    finally:
        check.close()
    return found


def case_methods(s: Session) -> list[Reply]:
    """The same prompts, each with nothing recomputed, by every method, and computed as a whole."""
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    found = []
    for order in ([3, 1, 0], [2, 3, 1, 0], [1, 0, 2]):
        prompt = s.prompt([chunks[i] for i in order])
        for method in ("full-reuse", *SELECTING):
            options: dict[str, Any] = {"method": method, "explain": True}
            if any(option.name == "drift" for option in METHODS[method].options_schema):
                options["options"] = {"drift": 0.5}
            found += s.send(prompt, ratio=0.3, options=options, max_new_tokens=1)
        found += s.send(prompt, options={"mode": "off"}, max_new_tokens=1)
    return found


def case_layers_at_ratio_one(s: Session) -> None:
    """Forwards in which rows may leave, of which none does."""
    chunks = s.chunks(40, 33, 51, 64)
    s.prime(chunks)
    for method in ("cacheblend", "a3", "fusionrag", "question-drift"):
        s.send(s.prompt([chunks[i] for i in (3, 1, 0)]), options={"method": method})


def differences(mine: Reply, theirs: Reply, *, with_inputs: bool = True) -> list[float]:
    """Of log-probabilities, up to where another token follows; `with_inputs` those of the prompt too."""
    found = []
    for i, (my_top, their_top) in enumerate(zip(mine.top_logprobs, theirs.top_logprobs, strict=False)):
        found += [abs(my_top[token] - their_top[token]) for token in my_top.keys() & their_top.keys()]
        if mine.output_ids[i : i + 1] != theirs.output_ids[i : i + 1]:
            break
    pairs = zip(mine.input_logprobs, theirs.input_logprobs, strict=True) if with_inputs else ()
    return found + [abs(a - b) for a, b in pairs if a is not None and b is not None]


def assert_near(pairs: Iterable[tuple[Reply, Reply]], *, with_inputs: bool = True) -> None:
    """Of ours and stock SGLang's."""
    found = list(itertools.chain(*(differences(*pair, with_inputs=with_inputs) for pair in pairs)))
    assert max(found) < TOLERANCE
    assert np.quantile(found, 0.9) < USUAL


def scales_of(layer: int) -> tuple[float, float]:
    """What `scaled` multiplies K and V of a layer with."""
    return 0.03 * (1 + layer / 2), 0.01 * (1 + layer)


def scaled(case: Callable[..., Any]) -> Callable[..., Any]:
    """`case`, with a scale of K and one of V at each layer; SGLang takes them from checkpoints in 16 bits only."""

    def run(s: Session, *numbers: int) -> Any:
        from sglang.srt.layers.radix_attention import RadixAttention

        model = s.local.scheduler.tp_worker.model_runner.model
        layers = [one for one in model.modules() if isinstance(one, RadixAttention)]
        for i, layer in enumerate(layers):
            layer.k_scale_float, layer.v_scale_float = scales_of(i)
            layer.k_scale, layer.v_scale = torch.tensor(layer.k_scale_float), torch.tensor(layer.v_scale_float)
        value = case(s, *numbers)
        for layer in layers:
            layer.k_scale = layer.v_scale = layer.k_scale_float = layer.v_scale_float = None
        return value

    return run


CASES = {
    **cases.CASES,
    "moved_keys": case_moved_keys,
    "methods": case_methods,
    "layers_at_ratio_one": case_layers_at_ratio_one,
    "recipes": selection_cases.CASES["methods"],
}
CASES |= {f"scaled_{name}": scaled(case) for name, case in CASES.items()}
