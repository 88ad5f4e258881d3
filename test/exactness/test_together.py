"""Chunks together with other features of SGLang, at recompute ratio 1.0, equal stock SGLang with the same flags."""

from __future__ import annotations

import pytest

from exactness.runner import Config
from exactness.test_ratio_one import RUNS, compare

ADAPTERS = ("adapters", "adapter_loaded_again")  # the second one changes an adapter
MODULE = "exactness.together_cases"
MIXED = (("enable_mixed_chunk", True),)
HIDDEN = (("enable_return_hidden_states", True),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Config(chunked=True, server=MIXED),
        pytest.param(
            Config(chunked=True, overlap=False, page_size=16, options=RUNS, server=MIXED), marks=pytest.mark.all
        ),
        Config(chunked=True, step_len=256, tp_size=2, options=RUNS, server=MIXED),
    ],
    ids=str,
)
def test_mixed_batches(config: Config) -> None:
    compare(config, "mixed_batches", ("mixed_batches",), MODULE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Config(discover=True, page_size=16, chunked=True),
        pytest.param(Config(discover=True, tp_size=2), marks=pytest.mark.all),
        pytest.param(Config(discover=True, options=RUNS, server=MIXED, chunked=True), marks=pytest.mark.all),
    ],
    ids=str,
)
def test_discovered_passages(config: Config) -> None:
    compare(config, "discovered", ("discovered",), MODULE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Config(server=HIDDEN), marks=pytest.mark.all),
        Config(chunked=True, page_size=16, overlap=False, options=RUNS, server=HIDDEN),
    ],
    ids=str,
)
def test_hidden_states(config: Config) -> None:
    compare(config, "hidden_states", ("hidden_states",), MODULE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Config(num_adapters=2),
        Config(num_adapters=2, layers=4, chunked=True, page_size=16, options=RUNS, server=MIXED),
        pytest.param(Config(num_adapters=2, layers=4, chunked=True, tp_size=2), marks=pytest.mark.all),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(config: Config, case: str) -> None:
    compare(config, case, ADAPTERS, MODULE)


@pytest.mark.slow
@pytest.mark.parametrize("config", [Config(), Config(chunked=True, page_size=16, options=RUNS)], ids=str)
def test_sessions(config: Config) -> None:
    compare(config, "sessions", ("sessions",), MODULE)
