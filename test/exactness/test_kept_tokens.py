"""Decoding over packed prompts: stock SGLang's where all is kept, else that of a decoder that masks what is dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exactness.kept_cases import KEEP, PACKING
from exactness.numpy_decoder import Array, Decoder, Forward
from exactness.runner import Config, run_cases
from exactness.test_ratio_one import MODEL_CASES, TOLERANCE, compare

MODULE = "exactness.kept_cases"
WINDOW, POOLING = 32, 7
CONFIGS = [
    Config(overlap=True),
    Config(page_size=16, chunked=True, overlap=False),
    Config(page_size=16, tp_size=2, overlap=True),
]
MODELS = [
    Config(kind="qwen3", page_size=16, force_retract=True),
    Config(kind="deepseek_v2", page_size=16, chunked=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIGS[0], *(pytest.param(one, marks=pytest.mark.all) for one in CONFIGS[1:])], ids=str
)
@pytest.mark.parametrize("case", PACKING)
def test_all_packed_equals_stock(config: Config, case: str) -> None:
    compare(config, case, tuple(PACKING), MODULE)


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS, ids=str)
@pytest.mark.parametrize("case", MODEL_CASES)
def test_all_packed_equals_stock_on_other_models(config: Config, case: str) -> None:
    compare(config, case, tuple(MODEL_CASES), MODULE)


@pytest.mark.slow
@pytest.mark.parametrize("config", [*CONFIGS, Config(overlap=False), Config(kind="qwen3", overlap=False)], ids=str)
def test_dropped_tokens_are_not_seen(config: Config) -> None:
    found = run_cases(config, is_ours=True, names=["small"], module=MODULE)["small"]
    assert not isinstance(found, str), found
    for ids, spans, reply in found:
        assert reply.info["kept_tokens"] == KEEP < len(ids)
        # With overlap, the second token is on its way when the first one is known.
        expected = decode(Decoder(config.model_dir), ids, spans, reply.output_ids, num_whole=int(config.overlap))
        for i, (top, log_probs) in enumerate(zip(reply.top_logprobs, expected, strict=True)):
            assert top == pytest.approx({token: log_probs[token] for token in top}, abs=TOLERANCE), f"token {i}"
    assert any(reply.info["reused_tokens"] for _, _, reply in found)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_that_are_not_needed_are_free(page_size: int) -> None:
    found = run_cases(Config(page_size=page_size), is_ours=True, names=["frees"], module=MODULE)["frees"]
    assert not isinstance(found, str), found
    assert found
    for num_slots, num_decoded, num_protected in found:
        assert num_slots <= KEEP + num_decoded + 1
        assert num_protected == 0, "what is in the prefix cache may be evicted"


@pytest.mark.slow
def test_a_prompt_that_stays_whole_is_told() -> None:
    found = run_cases(Config(), is_ours=True, names=["stays_whole"], module=MODULE)["stays_whole"]
    assert not isinstance(found, str), found
    told = {
        name: (found[name]["kept_tokens"], found[name].get("kept_reason"))
        for name in ("short", "short_stream", "full", "full_stream", "packed")
    }
    assert told == {
        "short": (found["len"], "short_answer"),
        "short_stream": (found["len"], "short_answer"),
        "full": (found["len"], "memory"),
        "full_stream": (KEEP, None),  # of its first output, when nobody knows yet
        "packed": (KEEP, None),
    }
    assert found["counted"] == ["short_answer", "short_answer", "memory", "memory"]


def decode(model: Decoder, ids: list[int], spans: list[list[int]], answer: list[int], *, num_whole: int) -> list[Array]:
    """Log-probabilities of each token of the answer; the first `num_whole` decoding steps see all."""
    total = len(ids) + len(answer)
    k = np.full((model.num_layers, total, model.num_kv_heads, model.head_dim), np.nan)
    v = k.copy()
    prompt = Forward(model, ids, k[:, : len(ids)], v[:, : len(ids)], range(len(ids)))
    kept = [_kept(prompt.attend(), spans, len(ids), model.num_kv_heads) for _ in range(model.num_layers)]
    found = [prompt.log_probs()]
    for step, token in enumerate(answer[:-1]):
        position = np.array([len(ids) + step])
        x = model.embed([token])
        for layer in range(model.num_layers):
            q, k[layer, position], v[layer, position] = model.project(layer, x, position)
            seen = slice(0, position[0] + 1)
            weights = np.nan_to_num(model.weights(layer, q, position, k[layer, seen]))
            if step >= num_whole:
                weights = weights * _mask(kept[layer], position[0] + 1, model.num_heads)
                weights = weights / weights.sum(axis=-1, keepdims=True)
            x = model.finish(layer, x, weights, v[layer, seen])
        found.append(model.log_probs(x[-1]))
    return found


def _kept(weights: Array, spans: list[list[int]], num_tokens: int, num_kv_heads: int) -> list[set[int]]:
    """Per KV head, the positions of the prompt that are kept."""
    begin, end = spans[0][0], min(spans[-1][1], num_tokens - WINDOW)
    room = KEEP - begin - (num_tokens - end)
    found = []
    for of_group in np.split(weights[-WINDOW:], num_kv_heads, axis=1):
        scores = of_group.sum(axis=(0, 1))[begin:end]
        pooled = [max(scores[max(i - POOLING // 2, 0) : i + POOLING // 2 + 1]) for i in range(len(scores))]
        best = sorted(range(len(pooled)), key=lambda i: (-pooled[i], i))[:room]
        found.append({*range(begin), *(begin + i for i in best), *range(end, num_tokens)})
    return found


def _mask(kept: list[set[int]], num_keys: int, num_heads: int) -> Any:
    """1 where a head sees a key: what was decoded, and what is kept of the prompt."""
    last = max(kept[0])
    rows = [[float(i > last or i in of_head) for i in range(num_keys)] for of_head in kept]
    return np.repeat(np.array(rows), num_heads // len(kept), axis=0)
