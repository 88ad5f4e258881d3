"""Fused prefills by SGLang's breakable prefill graphs, recorded on the CPU: what is replayed, and that it is right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from exactness.graph_cases import BUCKETS
from exactness.runner import Config, run_cases
from exactness.test_ratio_one import TOLERANCE
from local_scheduler import Reply

pytestmark = pytest.mark.slow

CHOOSE = {"cacheblend": "LayerwiseForward", "fusionrag": "FusedRows", "question-drift": "LayerwiseForward"}
"""What attends where these choose: rows leave, only rows, reused K and V are corrected."""
ASK = ("fusionrag", "question-drift")


@cache
def outcome(attention: str) -> tuple[Any, Any, Any]:
    """Of ours by graphs, of ours without, and of stock without."""
    config = Config(options=(("attention", attention),))
    sides = [
        run_cases(config, is_ours=is_ours, names=[case], module="exactness.graph_cases")[case]
        for is_ours, case in ((True, "by_graphs"), (True, "eagerly"), (False, "eagerly"))
    ]
    assert not any(isinstance(side, str) for side in sides), sides
    return tuple(sides)  # type: ignore[return-value]


on_each_path = pytest.mark.parametrize("attention", ["runs", pytest.param("rows", marks=pytest.mark.all)])


def compare(replies: list[Reply], expected: list[Reply]) -> None:
    for mine, theirs in zip(replies, expected, strict=True):
        assert mine.output_ids == theirs.output_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


@on_each_path
def test_ratio_one_by_graphs_equals_stock(attention: str) -> None:
    (replies, *_), _, (stock, *_) = outcome(attention)
    assert len(replies) > 10
    compare(replies, stock)


@on_each_path
def test_other_ratios_by_graphs_equal_those_without(attention: str) -> None:
    (_, replies, _), (_, eager, _), _ = outcome(attention)
    assert len(replies) == 13
    compare(replies, eager)


@on_each_path
def test_only_forwards_in_which_rows_leave_are_eager(attention: str) -> None:
    (_, _, parts), *_ = outcome(attention)
    fused = "BackendRuns" if attention == "runs" else "FusedRows"
    assert len(parts) == 19
    for name, served in parts.items():
        method, _, ratio = name.partition(" ")
        attends = ["stock" if name in ("observed", "plain") else fused]
        if method in CHOOSE and ratio == "0.3":
            attends = [*attends[: method in ASK], CHOOSE[method]]
        if name == "questions beside others":
            attends.append(CHOOSE["question-drift"])
        leaves = method == "cacheblend" and ratio == "0.3"
        assert list(dict.fromkeys(one.attention for one in served)) == list(dict.fromkeys(attends)), name
        for one in served:
            assert (one.bucket is None) == leaves, (name, one)
            assert one.bucket is None or one.num_rows <= one.bucket in BUCKETS
    assert all(one.num_observers == 1 for one in parts["observed"]), "statistics are taken between segments"
