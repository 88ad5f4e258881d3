"""Nothing leaks, nothing approximate is left behind, nobody is lost under memory pressure."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from exactness.runner import Config, run_cases

PRESSURE = [
    Config(max_total_tokens=900, conservativeness=0.05, force_retract=True),
    # Without the room for reused chunks, so that requests are admitted until the pool overflows.
    Config(max_total_tokens=1024, conservativeness=0.05, page_size=16, chunked=True, options=(("keep_share", 0.0),)),
    Config(max_total_tokens=900, conservativeness=0.05, overlap=False, chunked=True, force_retract=True),
]


@cache
def outcome(config: Config, is_ours: bool, case: str) -> Any:
    result = run_cases(config, is_ours=is_ours, names=[case], module="exactness.stress")[case]
    assert not isinstance(result, str), result
    return result


def same(ours: list[Any], stock: list[Any], tolerance: float) -> None:
    assert len(ours) == len(stock) > 0
    for i, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert mine.output_ids == theirs.output_ids, f"request {i}"
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tolerance), f"request {i}"


def check_random_requests(config: Config, case: str, num: int) -> None:
    counts = outcome(config, True, case)
    assert counts["finished"] == num
    assert counts["hits"] > num / 10
    assert counts["misses"] > num / 10
    assert counts["aborted"] > num / 100
    assert counts["retracted_fused"] >= (num / 200 if config.force_retract else 0)


@pytest.mark.slow
@pytest.mark.parametrize("config", PRESSURE, ids=str)
def test_random_requests_under_pressure(config: Config) -> None:
    check_random_requests(config, "random_requests", 300)


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize("config", PRESSURE, ids=str)
def test_more_random_requests_under_pressure(config: Config) -> None:
    check_random_requests(config, "more_random_requests", 1000)


@pytest.mark.slow
@pytest.mark.parametrize("config", PRESSURE, ids=str)
def test_case_22_retraction(config: Config) -> None:
    ours, stock = outcome(config, True, "22_retraction"), outcome(config, False, "22_retraction")
    same(ours, stock, 1e-4)
    assert any(r.retractions and r.info and r.info["reused_tokens"] for r in ours), "no fused request was retracted"


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_fused_requests_never_change_exact_ones(page_size: int) -> None:
    config = Config(page_size=page_size, max_total_tokens=16384)
    same(outcome(config, True, "exact_after_fused"), outcome(config, False, "exact_after_fused"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_full_reuse_computes_less_and_differs(page_size: int) -> None:
    for reused, exact in outcome(Config(page_size=page_size), True, "full_reuse"):
        info = reused.info
        assert info["prefix_tokens"] + info["reused_tokens"] + info["computed_tokens"] == info["chunks"][-1]["end"] + 9
        assert info["recomputed_tokens"] == 0
        assert info["reused_tokens"] > 100
        assert reused.cached_tokens == info["prefix_tokens"]
        assert reused.cached_details == {"device": info["prefix_tokens"], "host": 0}
        difference = max(abs(a - b) for a, b in zip(reused.logprobs, exact.logprobs, strict=True))
        assert difference > 1e-3
