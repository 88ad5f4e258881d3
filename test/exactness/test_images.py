"""A request with an image is served as by stock SGLang, beside texts whose chunks are reused."""

from __future__ import annotations

import pytest

from exactness.runner import Config, run_cases
from exactness.test_ratio_one import RUNS, compare

MODULE = "exactness.image_cases"
CASES = ("images_beside_texts", "images_beside_rows_that_leave")
CONFIGS = [
    Config(kind="qwen3_vl", layers=4, page_size=16),
    *(
        pytest.param(config, marks=pytest.mark.all)
        for config in (
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
@pytest.mark.parametrize("kind", ["gemma3_mm"])
def test_who_looks_on_sees_the_positions_of_the_prompt(kind: str) -> None:
    config = Config(kind=kind, layers=4)
    (found,) = run_cases(config, is_ours=True, names=["positions_that_observers_see"], module=MODULE).values()
    assert not isinstance(found, str), found
