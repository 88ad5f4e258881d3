"""Recompute ratio 1.0 equals stock SGLang, in every scheduling situation."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from exactness.cases import CASES
from exactness.runner import Config, run_cases

TOLERANCE = 1e-4  # log-probabilities, fp32

STATES = {"layers": 4, "tree_core": "python", "method": "seams", "options": (("seam_len", 8),)}  # beside KV
RUNS = (("attention", "runs"),)  # of --chunk-cache-config
# Every pair of values of page size, TP size, chunked prefill, overlap, tree core, messages and attention is in one.
# Two of them run in `make test-all` alone (`LONG` in test/conftest.py).
PAIRWISE = [
    Config(page_size=1, tp_size=1, chunked=False, overlap=True, typed=True),
    Config(page_size=16, tp_size=1, chunked=True, overlap=False, typed=True, options=RUNS),
    Config(page_size=16, tp_size=2, chunked=False, overlap=True, options=RUNS),
    Config(page_size=1, tp_size=2, chunked=True, overlap=False, tree_core="python", typed=True),
    Config(page_size=16, tp_size=1, chunked=True, overlap=True, tree_core="python"),
    Config(page_size=1, tp_size=1, chunked=False, overlap=False, tree_core="python", options=RUNS),
]
OTHERS = [
    config
    for page, tp, chunked, overlap, options in itertools.product(
        (1, 16), (1, 2), (False, True), (True, False), ((), RUNS)
    )
    if (config := Config(page_size=page, tp_size=tp, chunked=chunked, overlap=overlap, options=options))
    not in [replace(one, tree_core="rust", typed=False) for one in PAIRWISE]
]
# Case 12, and the other model classes.
MODELS = [
    Config(rope="llama3"),
    Config(rope="yarn", page_size=16),
    Config(rope="dynamic", chunked=True),
    Config(kind="llama_sharp", layers=3),
    Config(kind="qwen2"),
    Config(kind="qwen3", page_size=16),
    Config(kind="granite", chunked=True),
    Config(kind="cohere", page_size=16),
    Config(kind="qwen3_moe", tp_size=2, server=(("ep_size", 2),)),
    Config(kind="deepseek_v2", page_size=16, chunked=True),
    Config(kind="gemma3", layers=4, page_size=16),  # windows shorter than a chunk, two rotary bases
    Config(kind="gemma3_mm", layers=4, chunked=True),
    Config(kind="gpt_oss", layers=4, page_size=16, chunked=True),  # attention sinks
    Config(kind="qwen3_vl", page_size=16, tp_size=2),
    Config(kind="qwen3_5", chunked=True, **STATES),
]
MORE_MODELS = [
    Config(rope="linear", options=(("verify_share", 1.0),)),
    Config(rope="dynamic", page_size=16, tp_size=2, options=RUNS),
    Config(kind="phi3", rope="longrope", server=(("context_length", 2048),)),
    Config(kind="phi3", rope="longrope", page_size=16, tp_size=2, chunked=True, server=(("context_length", 2048),)),
    Config(kind="mistral", chunked=True),
    Config(kind="glm4", page_size=16, options=RUNS),
    Config(kind="mixtral", tp_size=2),
    Config(kind="phi3"),
    Config(kind="glm4_moe", overlap=False),
    Config(kind="olmo2", overlap=False),
    Config(kind="stablelm", options=RUNS),
    Config(kind="gemma"),
    Config(kind="arcee", chunked=True, options=RUNS),
    Config(kind="starcoder2", page_size=16),
    Config(kind="qwen2_moe", page_size=16, options=RUNS),
    Config(kind="olmoe", options=RUNS),
    Config(kind="deepseek_v2", tp_size=2, options=RUNS),
    Config(kind="deepseek_v3"),
    Config(kind="gemma3", layers=4, chunked=True, options=RUNS),
    Config(kind="qwen3_moe", chunked=True),
    Config(kind="mistral_window"),
    Config(kind="gemma3_mm", layers=4, page_size=16, tp_size=2, options=RUNS),
    Config(kind="gpt_oss", layers=4, tp_size=2),
    Config(kind="gpt_oss", layers=4, chunked=True, overlap=False, options=RUNS),
    Config(kind="gpt_oss", layers=4, server=(("enable_mixed_chunk", True),), chunked=True),
    Config(kind="mistral3", page_size=16, chunked=True),
    Config(kind="mistral3", tp_size=2, options=RUNS),
    Config(kind="qwen2_5_vl", chunked=True),
    Config(kind="qwen2_5_vl", tp_size=2, page_size=16, options=RUNS),
    Config(kind="qwen3_vl", chunked=True, options=RUNS),
    Config(kind="qwen3_vl", server=(("json_model_override_args", '{"language_model_only": true}'),)),
    Config(kind="kimi_k25", chunked=True, page_size=16),
    Config(kind="kimi_k25", tp_size=2, options=RUNS),
    Config(kind="deepseek_v2", tp_size=2, options=RUNS, server=(("ep_size", 2),)),
    Config(kind="qwen3_5", tp_size=2, page_size=16, **STATES),
    Config(kind="qwen3_5", overlap=False, **STATES),
    Config(kind="qwen3_5", chunked=True, server=(("enable_mixed_chunk", True),), **STATES),
    Config(kind="qwen3_next", chunked=True, page_size=16, **STATES),
]
MODEL_CASES = ["02_all_hits_in_another_order", "04_miss_between_two_hits", "07_stored_after_partial_reuse"]


@cache
def replies(config: Config, names: tuple[str, ...], module: str = "exactness.cases") -> list[dict[str, Any]]:
    """Replies of ours and of stock, side by side where each is one process: ranks that wait for each other spin."""
    with ThreadPoolExecutor(2 // config.tp_size) as pool:
        return list(
            pool.map(
                lambda is_ours: run_cases(config, is_ours=is_ours, names=list(names), module=module), (True, False)
            )
        )


def compare(config: Config, case: str, names: tuple[str, ...], module: str = "exactness.cases") -> None:
    ours, stock = (side[case] for side in replies(config, names, module))
    assert not isinstance(stock, str), f"stock: {stock}"
    assert not isinstance(ours, str), f"ours: {ours}"
    assert len(ours) == len(stock) > 0
    for i, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        where = f"request {i} of {case}"
        assert mine.output_ids == theirs.output_ids, where
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE), where
        assert len(mine.top_logprobs) == len(theirs.top_logprobs), where
        for my_top, their_top in zip(mine.top_logprobs, theirs.top_logprobs, strict=True):
            assert my_top == pytest.approx(their_top, abs=TOLERANCE), where
        assert _flat(mine.hidden_states) == pytest.approx(_flat(theirs.hidden_states), abs=TOLERANCE), where
        assert len(mine.input_logprobs) == len(theirs.input_logprobs), where
        for my_value, their_value in zip(mine.input_logprobs, theirs.input_logprobs, strict=True):
            assert my_value == (None if their_value is None else pytest.approx(their_value, abs=TOLERANCE)), where


def _flat(nested: Any) -> list[float]:
    return [value for one in nested for value in _flat(one)] if isinstance(nested, list) else [nested]


def matrix(configs: list[Config]) -> Any:
    pairs = [pytest.param(config, case, id=f"{config}-{case}") for config in configs for case in CASES]
    return pytest.mark.parametrize(("config", "case"), pairs)


@pytest.mark.slow
@matrix(PAIRWISE)
def test_equals_stock(config: Config, case: str) -> None:
    compare(config, case, tuple(CASES))


@pytest.mark.all
@matrix(OTHERS)
def test_equals_stock_everywhere(config: Config, case: str) -> None:
    compare(config, case, tuple(CASES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [*MODELS, *(pytest.param(config, marks=pytest.mark.all) for config in MORE_MODELS)],
    ids=str,
)
@pytest.mark.parametrize("case", MODEL_CASES)
def test_case_12_rope_scaling_and_other_models(config: Config, case: str) -> None:
    compare(config, case, tuple(MODEL_CASES))


def test_pairwise_covers_every_pair() -> None:
    fields = ("page_size", "tp_size", "chunked", "overlap", "tree_core", "typed", "options")
    for one, other in itertools.combinations(fields, 2):
        assert len({(getattr(config, one), getattr(config, other)) for config in PAIRWISE}) == 4, (one, other)
