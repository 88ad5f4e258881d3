"""Images: beside chunks, and in them; ratio 1.0 equals stock SGLang, and below it no image is encoded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactness.runner import Config, run_cases
from exactness.test_ratio_one import RUNS, TOLERANCE, compare

MODULE = "exactness.image_cases"
CASES = (
    "chunks_behind_images",
    "images_in_chunks",
    "chunks_end_in_images",
    "images_beside_texts",
    "images_beside_rows_that_leave",
    "images_packed_whole",
)
CONFIGS = [
    Config(kind="qwen3_vl", layers=4, page_size=16),
    *(
        pytest.param(config, marks=pytest.mark.all)
        for config in (
            Config(kind="qwen3_vl", layers=4),
            Config(kind="qwen3_vl", layers=4, tp_size=2, options=RUNS),
            Config(kind="qwen3_vl", layers=4, chunked=True),
            Config(kind="qwen2_5_vl", layers=4),
            Config(kind="qwen2_5_vl", layers=4, page_size=16, chunked=True, options=RUNS),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_images_equal_stock(config: Config, case: str) -> None:
    compare(config, case, CASES, MODULE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.all)])
def test_images_that_are_reused_in_full_are_moved_rightly(kind: str) -> None:
    compare(Config(kind=kind, layers=1), "images_reused_in_full", ("images_reused_in_full",), MODULE)


@pytest.mark.slow
def test_images_are_read_from_disk(tmp_path: Path) -> None:
    tiers = {"disk": {"path": str(tmp_path)}, "controller": False}
    config = Config(kind="qwen3_vl", layers=1, options=(("tiers", tiers),))
    ours, stock = (
        run_cases(config, is_ours=is_ours, names=["images_from_disk"], module=MODULE)["images_from_disk"]
        for is_ours in (True, False)
    )
    assert not isinstance(ours, str), ours
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [("gemma3_mm", "positions_that_observers_see"), ("qwen3_vl", "images_at_a_low_ratio")],
)
def test_of_our_server_alone(kind: str, case: str) -> None:
    (found,) = run_cases(Config(kind=kind, layers=4), is_ours=True, names=[case], module=MODULE).values()
    assert not isinstance(found, str), found
