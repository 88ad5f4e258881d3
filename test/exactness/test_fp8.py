"""A KV cache in FP8: ratio 1.0 beside stock SGLang, moved keys beside those that the model computes there.

Stock stores the same roundings. But K and V that differ in their last bits, as those of batches of other sizes do, may
round to neighbours, which lie 2**-3 (e4m3) or 2**-2 (e5m2) of their size apart. That is rare, and what it does to a
log-probability is in `TOLERANCE`; an error of a scale or a shift is larger by far.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunk_cache.options.config import Config as ChunkCacheConfig
from exactness.cases import CASES
from exactness.fp8_cases import TOLERANCE, USUAL, MovedKeys, assert_near, differences, scales_of
from exactness.numpy_decoder import Decoder
from exactness.runner import Config, run_cases
from exactness.selection_cases import Run
from exactness.selection_reference import Store
from exactness.test_ratio_one import MODEL_CASES, RUNS, replies
from exactness.test_selection import distance_to, dropped_by, follow, selected_by
from exactness.test_tiers import tiers
from local_scheduler import Reply

pytestmark = pytest.mark.slow

MODULE = "exactness.fp8_cases"
ROWS_LEAVE = "layers_at_ratio_one"
SCALED = tuple(f"scaled_{name}" for name in (*MODEL_CASES, ROWS_LEAVE))
E4M3, E5M2 = (("kv_cache_dtype", "fp8_e4m3"),), (("kv_cache_dtype", "fp8_e5m2"),)
STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""By how much of its size rounding changes a number at most."""
SMALLEST = {E4M3: 3 * 2.0**-9, E5M2: 3 * 2.0**-16}
HALF = Config(kind="llama_fp8_kv", page_size=16, server=(("dtype", "float16"),))
"""Of a checkpoint with scales, which asks for FP8 itself; in 16 bits much more rounds to neighbours."""
MATRIX = [
    Config(server=E4M3),
    Config(server=E5M2, page_size=16, chunked=True, options=RUNS),
    Config(server=E4M3, page_size=16, tp_size=2, overlap=False, options=RUNS),
]
MODELS = [
    Config(kind="qwen3", server=E4M3, page_size=16),
    Config(kind="deepseek_v2", server=E4M3, chunked=True),
    Config(kind="gemma3", layers=4, server=E5M2),
]


def checked(value: Any) -> Any:
    assert not isinstance(value, str), value
    return value


def each_near(mine: list[Reply], theirs: list[Reply]) -> None:
    pairs = list(zip(mine, theirs, strict=True))
    assert all(differences(*pair) for pair in pairs), "each reply has something to compare"
    assert_near(pairs)


def near_stock(config: Config, case: str, names: tuple[str, ...], module: str = MODULE) -> None:
    each_near(*(checked(side[case]) for side in replies(config, names, module)))


@pytest.mark.parametrize(
    "config", [MATRIX[0], *(pytest.param(one, marks=pytest.mark.all) for one in MATRIX[1:])], ids=str
)
@pytest.mark.parametrize("case", [*CASES, ROWS_LEAVE])
def test_ratio_one_is_near_stock(config: Config, case: str) -> None:
    near_stock(config, case, (*CASES, ROWS_LEAVE))


@pytest.mark.all
@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_ratio_one_is_near_stock_with_scales(kv: Any, case: str) -> None:
    config = Config(server=kv, page_size=16, layers=4, options=RUNS if kv is E4M3 else ())
    near_stock(config, case, SCALED)


@pytest.mark.all
@pytest.mark.parametrize("case", MODEL_CASES)
def test_checkpoint_with_scales_is_near_stock(case: str) -> None:
    ours, stock = (checked(side[case]) for side in replies(HALF, tuple(MODEL_CASES)))
    found = list(itertools.chain(*(differences(*pair) for pair in zip(ours, stock, strict=True))))
    assert max(found) < TOLERANCE
    assert np.median(found) < 0.01


@pytest.mark.all
@pytest.mark.parametrize("config", MODELS, ids=str)
@pytest.mark.parametrize("case", MODEL_CASES)
def test_ratio_one_is_near_stock_for_other_models(config: Config, case: str) -> None:
    near_stock(config, case, tuple(MODEL_CASES))


SHIFTS = (1, 37, 900, 8000)
on_low = pytest.mark.parametrize(
    "config",
    [Config(layers=4, server=E4M3), pytest.param(Config(layers=4, server=E5M2, tp_size=2), marks=pytest.mark.all)],
    ids=str,
)


@cache
def at_low_ratios(config: Config) -> dict[str, Any]:
    names = ["methods"]
    if config.server:
        names += ["scaled_recipes", *(f"{scaled}moved_keys {shift}" for scaled in ("", "scaled_") for shift in SHIFTS)]
    return run_cases(config, is_ours=True, names=names, module=MODULE)


@on_low
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("scaled", ["", "scaled_"])
def test_moved_keys_are_near_those_computed_there(config: Config, scaled: str, shift: int) -> None:
    """Two dimensions that turn together are rounded where they were computed and again where they are moved.

    What the model computes there is rounded too: at the first layer three times `STEP` of their size, at most, or
    steps of the smallest number. Layers behind it attend from what was rounded, so theirs grow as the start allows.
    """
    layers: list[MovedKeys] = checked(at_low_ratios(config)[f"{scaled}moved_keys {shift}"])
    step = STEP[config.server]
    assert (layers[0].error <= 3 * step * layers[0].size + SMALLEST[config.server]).all()
    for i, layer in enumerate(layers):
        assert np.linalg.norm(layer.error) <= step * (1 + i) ** 0.5 * np.linalg.norm(layer.size)


@on_low
def test_methods_lose_no_more_than_a_full_prefill(config: Config) -> None:
    """By FP8, beside the same on a KV cache in 32 bits; and they choose nearly the same tokens."""
    pairs = list(zip(*(checked(at_low_ratios(one)["methods"]) for one in (config, Config(layers=4))), strict=True))
    lost: dict[bool, list[float]] = {True: [], False: []}
    for rounded, whole in pairs:
        lost[bool((rounded.info or {}).get("reused_tokens"))] += differences(rounded, whole)
    assert len(lost[True]) > 100
    assert 1e-3 < np.median(lost[True]) < 2 * np.median(lost[False])
    chosen = [(recomputed(rounded), recomputed(whole)) for rounded, whole in pairs]
    assert np.mean([len(a & b) / len(a | b) for a, b in chosen if a | b]) > 0.85


@on_low
def test_methods_equal_the_reference(config: Config) -> None:
    """One in numpy that rounds, with scales, whatever it stores; a number that rounds otherwise may change a choice."""
    runs: list[Run] = checked(at_low_ratios(config)["scaled_recipes"])  # by now the model is written
    scales = [scales_of(layer) for layer in range(config.layers)]
    model = Decoder(config.model_dir, dict(config.server)["kv_cache_dtype"], scales)
    store = Store(model, statistics_layers=ChunkCacheConfig().layers_with_statistics(config.layers))
    found = []
    for run in runs:
        result = store.execute(run.ids, run.chunk_cache, run.reply.info, follow(run), run.reply.first_step_end)
        if selected_by(run) == result.selected and dropped_by(run) == result.dropped_at():
            found.append(distance_to(store, run, result))
    assert len(found) > 0.98 * len(runs)
    assert max(found) < TOLERANCE
    assert np.quantile(found, 0.9) < USUAL


def recomputed(reply: Reply) -> set[int]:
    return {p for chunk in (reply.info or {}).get("chunks", ()) for p in chunk.get("recomputed_positions") or ()}


@pytest.mark.all
@pytest.mark.parametrize("loading", ["prefetch", "layerwise"])
@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_tier_keeps_the_bytes(tmp_path: Path, kv: Any, loading: str) -> None:
    settings = {"disk": {"path": str(tmp_path)}, "loading": loading, "controller": False}
    config = Config(page_size=16, server=kv, options=(("tiers", settings),))
    found = checked(run_cases(config, is_ours=True, names=["pages"], module="exactness.tier_cases")["pages"])
    pool, disk, again = found["0"]
    assert [tiers(reply) for reply in (pool, disk, again)] == [["pool"] * 3, ["disk"] * 3, ["pool"] * 3]
    for reply in (disk, again):
        assert max(differences(reply, pool)) < USUAL
    each_near(found["1"], found["off"] * 3)


@pytest.mark.all
@pytest.mark.parametrize("case", MODEL_CASES)
def test_packed_prompts_are_near_stock(case: str) -> None:
    config = Config(server=E4M3, page_size=16)
    near_stock(config, case, tuple(MODEL_CASES), "exactness.kept_cases")
