"""Data-parallel attention: ratio 1.0 equals stock SGLang's, and few rows give what a server of one rank gives.

Each rank has requests of its own. The ranks run the cases in different orders, so that one computes fused requests
while another computes plain ones, decodes or has nothing to do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exactness.dp_attention_cases import CASES
from exactness.kept_cases import PACKING
from exactness.runner import Config, run_cases
from exactness.test_ratio_one import RUNS, TOLERANCE, compare

MODULE = "exactness.dp_attention_cases"
RANKS: dict[str, Any] = {"tp_size": 2, "attn_dp_size": 2}
CONFIGS = [
    Config(kind="qwen3", **RANKS),
    Config(
        kind="deepseek_v2", page_size=16, chunked=True, options=RUNS, server=(("enable_mixed_chunk", True),), **RANKS
    ),
    Config(kind="qwen3_moe", num_idle=1, overlap=False, **RANKS),
]
EXACT = tuple(name for name in CASES if name not in ("few_rows", "from_disk"))
FEW = ("few_rows 1", "few_rows 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "case"),
    [
        pytest.param(config, case, id=f"{config}-{case}", marks=[pytest.mark.all] if config != CONFIGS[0] else [])
        for config in CONFIGS
        for case in EXACT
    ],
)
def test_equals_stock(config: Config, case: str) -> None:
    compare(config, case, EXACT, MODULE)


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize("case", PACKING)
def test_all_packed_equals_stock(case: str) -> None:
    config = Config(kind="qwen3", page_size=16, force_retract=True, **RANKS)
    compare(config, case, tuple(PACKING), "exactness.kept_cases")


@pytest.mark.slow
@pytest.mark.all
def test_chunks_come_from_disk(tmp_path: Path) -> None:
    config = Config(kind="qwen3", options=(("tiers", {"disk": str(tmp_path), "controller": False}),), **RANKS)
    found = run_cases(config, is_ours=True, names=["from_disk"], module=MODULE)["from_disk"]
    assert not isinstance(found, str), found
    assert len(found) == 8
    for reused, plain in zip(found[::2], found[1::2], strict=True):
        assert reused.output_ids == plain.output_ids
        assert reused.logprobs == pytest.approx(plain.logprobs, abs=TOLERANCE)


@cache
def few(kind: str, **ranks: Any) -> dict[str, Any]:
    return run_cases(Config(kind=kind, **ranks), is_ours=True, names=list(FEW), module=MODULE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.all), "deepseek_v2"])
@pytest.mark.parametrize("case", FEW)
def test_few_rows_equal_those_of_one_rank(kind: str, case: str) -> None:
    alone, ranks = few(kind)[case], few(kind, **RANKS)[case]
    assert not isinstance(alone, str), alone
    assert not isinstance(ranks, str), ranks
    assert len(ranks) == 2 * len(alone) > 0
    for i, reply in enumerate(ranks):
        expected = alone[i % len(alone)]
        assert reply.output_ids == expected.output_ids, i
        assert reply.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE), i
        assert _rows(reply) == _rows(expected), i


def _rows(reply: Any) -> Any:
    names = ("method", "prefix_tokens", "reused_tokens", "recomputed_tokens")
    return reply.info and [reply.info[name] for name in names]
