"""Causes: what of the reused KV does the harm. Nothing is recomputed; one thing is put right, or changed, at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.rows import KV

NUM_PARTS = 4
FIRST = (1, 8)
TEMPERATURES = (0.95, 1.05, 1.1)
BIASES = (-0.3, 0.3)


def causes(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of `Case.judge`) of every experiment; the chunks' KV is what a full prefill says where it
    says `true`, and everything else is as reused.
    """
    reused = slice(case.spans[0][1], case.tail_start)
    none = torch.arange(0)

    def with_true(layers: slice = slice(None), where: slice | torch.Tensor = reused, parts: str = "kv") -> KV:
        cache = case.reused.clone()
        if "k" in parts:
            cache.k[layers, where] = case.full.k[layers, where]
        if "v" in parts:
            cache.v[layers, where] = case.full.v[layers, where]
        return cache

    yield "reused", {"rows": none}
    yield "true K", {"rows": none, "cache": with_true(parts="k")}
    yield "true V", {"rows": none, "cache": with_true(parts="v")}
    num_layers = case.model.num_layers
    for part in range(NUM_PARTS):
        layers = slice(part * num_layers // NUM_PARTS, (part + 1) * num_layers // NUM_PARTS)
        yield f"true in layers {layers.start} to {layers.stop - 1}", {"rows": none, "cache": with_true(layers)}
    for num in FIRST:
        first = torch.cat([torch.arange(start, start + num) for start, _ in case.spans[1:]])
        yield f"true first {num} of each chunk", {"rows": none, "cache": with_true(where=first)}
    yield "keys not turned", {"rows": none, "cache": _not_turned(case)}
    for temperature in TEMPERATURES:
        cache = case.reused.clone()
        cache.k[:, reused] /= temperature
        yield f"temperature {temperature}", {"rows": none, "cache": cache}
    for bias in BIASES:
        added = torch.zeros(1, case.prompt_len)
        added[:, reused] = bias
        tail_len = case.prompt_len - case.tail_start
        yield f"scores {bias:+}", {"rows": none, "bias": added.expand(tail_len, -1), "answer_bias": added}
    yield "mean drift of each chunk", {"rows": none, "cache": _with_mean_drift(case)}


def _not_turned(case: Case) -> KV:
    cache = case.reused.clone()
    for start, end in case.spans[1:]:
        cache.k[:, start:end] = case.model.turn(cache.k[:, start:end], case.head_len - start)
    return cache


def _with_mean_drift(case: Case) -> KV:
    """The true change of each chunk, averaged over its tokens, given to all of them: the part that they share."""
    cache = case.reused.clone()
    for start, end in case.spans[1:]:
        positions = torch.arange(start, end)
        drift = case.model.turn(case.full.k[:, start:end] - cache.k[:, start:end], -positions).mean(1, keepdim=True)
        cache.k[:, start:end] += case.model.turn(drift.expand_as(cache.k[:, start:end]), positions)
        cache.v[:, start:end] += (case.full.v[:, start:end] - cache.v[:, start:end]).mean(1, keepdim=True)
    return cache
