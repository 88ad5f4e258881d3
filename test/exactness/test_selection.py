"""Every method does what its paper says: the server against a numpy reference that shares no code with it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunk_cache.options.config import Config as ChunkCacheConfig
from exactness.numpy_decoder import Decoder
from exactness.runner import Config, run_cases
from exactness.selection_cases import CASES, GROUPING, SELECTING, Run
from exactness.selection_reference import Choose, Result, Scores, Store, best, focused_chunks
from exactness.test_ratio_one import RUNS

TOLERANCE = 1e-3  # log-probabilities, fp32 against fp64
EXACT_TOLERANCE = 1e-5  # log-probabilities, fp32 against fp32
NEAR_TIE = 1e-5  # scores that may change places, relative
ROUNDING = 1e-8  # and absolute: deviations of tokens that stand where and behind what they were computed are 0

CONFIGS = [
    Config(layers=4, page_size=16, tp_size=2),
    Config(layers=4, page_size=16, chunked=True, options=RUNS),
]
MORE_CONFIGS = [
    Config(layers=4),
    Config(layers=6),
    Config(layers=6, page_size=16, tp_size=2),
    Config(layers=4, page_size=16, overlap=False),
    Config(layers=4, tp_size=2, options=RUNS),
    Config(layers=5, rope="llama3"),
    Config(layers=4, rope="yarn", page_size=16),
    Config(layers=4, kind="qwen2", tp_size=2, page_size=16),
    Config(layers=4, kind="qwen3"),
    Config(layers=4, kind="gpt_oss", page_size=16),
    Config(layers=4, kind="mistral3", chunked=True),
    Config(layers=4, kind="qwen3_vl"),
    Config(layers=6, chunked=True, overlap=False, tree_core="python", typed=True),
]

on_each_config = pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(config, id=str(config), marks=pytest.mark.slow) for config in CONFIGS),
        *(pytest.param(config, id=str(config), marks=pytest.mark.all) for config in MORE_CONFIGS),
    ],
)


@cache
def outcomes(config: Config) -> dict[str, Any]:
    model(config)  # written before the ranks read it
    return run_cases(config, is_ours=True, names=list(CASES), module="exactness.selection_cases")


@cache
def model(config: Config) -> Decoder:
    from tiny_models import make_model

    return Decoder(make_model(config.kind, config.model_dir, rope=config.rope, layers=config.layers))


def outcome(config: Config, case: str) -> Any:
    value = outcomes(config)[case]
    assert not isinstance(value, str), value
    return value


def new_store(config: Config) -> Store:
    layers = ChunkCacheConfig().layers_with_statistics(config.layers)
    return Store(model(config), statistics_layers=layers, page_size=config.page_size)


# The server's answer and the reference's, side by side.


def selected_by(run: Run) -> frozenset[int]:
    return frozenset(p for chunk in run.reply.info["chunks"] for p in chunk["recomputed_positions"])


def dropped_by(run: Run) -> dict[int, frozenset[int]]:
    dropped: dict[int, frozenset[int]] = {}
    for chunk in run.reply.info["chunks"]:
        for step in chunk.get("dropped", []):
            dropped[step["layer"]] = dropped.get(step["layer"], frozenset()) | frozenset(step["positions"])
    return dropped


def follow(run: Run) -> Choose:
    """Chooses like the reference, but like the server where the scores that they disagree on are nearly the same."""
    selected, dropped = selected_by(run), dropped_by(run)

    def choose(layer: int, scores: Scores, count: int) -> frozenset[int]:
        mine = best(layer, scores, count)
        left = selected.difference(*(gone for at, gone in dropped.items() if at <= layer))
        theirs = frozenset(scores) & left
        return theirs if theirs != mine and is_near_tie(scores, mine, theirs) else mine

    return choose


def is_near_tie(scores: Scores, mine: frozenset[int], theirs: frozenset[int]) -> bool:
    if len(mine) != len(theirs):
        return False
    better, worse = max(scores[p] for p in mine - theirs), min(scores[p] for p in theirs - mine)
    return better - worse <= max(NEAR_TIE * abs(better), ROUNDING)


def compare(store: Store, run: Run, where: str) -> Result:
    """Replays one request and compares all that the server said."""
    if run.chunk_cache is None:
        result = store.full(run.ids)
        assert distance_to(store, run, result) < TOLERANCE, f"{where}: plain"
        return result
    info = run.reply.info
    result = store.execute(run.ids, run.chunk_cache, info, follow(run), run.reply.first_step_end)
    where = f"{where}: {run.chunk_cache['method']} {run.chunk_cache.get('ratio')} {run.chunk_cache['options']}"
    assert selected_by(run) == result.selected, where
    selection = info.get("selection")
    assert (selection is None) == (not result.is_filtering), where
    if selection is not None:
        assert dropped_by(run) == result.dropped_at(), where
        rows_per_layer, num_asked = [len(rows) for rows in result.rows_at], result.num_asked_layers
        assert selection["rows_per_layer"][num_asked:] == rows_per_layer[num_asked:], where
        assert selection["rows_per_layer"][:num_asked] == [info["reused_tokens"]] * num_asked, where
        compare_scores(selection["scores"], result, where)
        if run.chunk_cache["options"].get("focus_window"):
            assert selection["focus"]["settled_at_layer"] == result.settled_at, where
            focused = selection["focus"]["chunks"]
            assert (None if focused is None else frozenset(focused)) == result.focused, where
    compare_variants(info["chunks"], result, where)
    assert distance_to(store, run, result) < TOLERANCE, where
    return result


def compare_variants(chunks: list[dict[str, Any]], result: Result, where: str) -> None:
    """The reply's CFO is the paper's, and no other variant would have had a lower one."""
    for chunk in chunks:
        if chunk["start"] in result.cfo:
            assert chunk["cfo"] == pytest.approx(result.cfo[chunk["start"]], rel=1e-4), where
        if chunk["start"] in result.lowest_cfo:
            assert chunk["cfo"] <= result.lowest_cfo[chunk["start"]] * (1 + 1e-4), where


def compare_scores(summary: dict[str, Any] | None, result: Result, where: str) -> None:
    if summary is None:
        return
    layer = -1 if summary["layer"] is None else summary["layer"]
    scores = result.scores_at[layer]
    near = {"rel": 1e-3, "abs": max(ROUNDING, 1e-5 * max(scores.values()))}
    assert summary["max"] == pytest.approx(max(scores.values()), **near), where
    assert summary["min"] == pytest.approx(min(scores.values()), **near), where
    assert summary["sum"] == pytest.approx(sum(scores.values()), **near), where
    assert summary["selected_sum"] == pytest.approx(sum(scores[p] for p in result.selected), **near), where


def distance_to(store: Store, run: Run, result: Result) -> float:
    """Between log-probabilities of the first two tokens; the second reads the KV that the prefill left behind."""
    behind = store.decode(result, run.ids, run.reply.output_ids[0])
    return max(
        _distance(top, mine) for top, mine in zip(run.reply.top_logprobs, (result.log_probs, behind), strict=True)
    )


def distance(run: Run, other: Run) -> float:
    """The same between two replies of the server."""
    pairs = zip(run.reply.top_logprobs, other.reply.top_logprobs, strict=True)
    assert run.reply.output_ids == other.reply.output_ids
    return max(_distance(top, other_top) for top, other_top in pairs)


def _distance(top: dict[int, float], log_probs: Any) -> float:
    """Over the five best tokens that the server names."""
    assert len(top) == 5
    return max(abs(value - log_probs[token]) for token, value in top.items())


def replay(config: Config, runs: Sequence[Run], case: str) -> list[Result]:
    store = new_store(config)
    return [compare(store, run, f"request {i} of {case}") for i, run in enumerate(runs)]


# Tests.


@on_each_config
@pytest.mark.parametrize("case", ["methods", "many_prompts"])
def test_equals_the_reference(config: Config, case: str) -> None:
    runs: list[Run] = outcome(config, case)
    results = replay(config, runs, case)
    # The scenarios are worth something: chunks stand elsewhere, rows leave, the focus settles.
    shifts = [chunk["shift"] for run in runs for chunk in run.reply.info["chunks"] if chunk["reused_tokens"]]
    assert sum(shift != 0 for shift in shifts) > len(shifts) / 2 > 30
    assert sum(bool(result.dropped_at()) for result in results) > 10
    assert sum(result.settled_at is not None for result in results) > 5


@on_each_config
def test_a_mixed_batch_equals_each_request_alone(config: Config) -> None:
    runs, pairs = outcome(config, "mixed_batches")
    replay(config, runs, "mixed_batches")
    for batched, alone in pairs:
        one, other = runs[batched], runs[alone]
        where = f"{one.chunk_cache['method']} {one.chunk_cache['options']}"
        assert (selected_by(one), dropped_by(one)) == (selected_by(other), dropped_by(other)), where
        assert distance(one, other) < EXACT_TOLERANCE, where


@on_each_config
def test_ratio_one_is_full_and_ratio_zero_full_reuse(config: Config) -> None:
    for outcome_by_name in outcome(config, "ends_of_the_ratio"):
        full, reuse = outcome_by_name.pop("full"), outcome_by_name.pop("full-reuse")
        plain = outcome_by_name.pop("plain")
        store = new_store(config)
        assert distance(full, plain) < EXACT_TOLERANCE
        assert distance_to(store, full, store.full(full.ids)) < TOLERANCE
        assert full.reply.info["reused_tokens"] > 0
        for name, run in outcome_by_name.items():
            if " 1.0" in name:
                assert distance(run, full) < EXACT_TOLERANCE, name
                assert run.reply.info["recomputed_tokens"] == run.reply.info["reused_tokens"], name
            elif name == "seams 0.0":
                assert run.reply.info["recomputed_tokens"] > 0
            else:
                assert run.reply.top_logprobs == reuse.reply.top_logprobs, name
                assert run.reply.info["recomputed_tokens"] == 0, name


@on_each_config
def test_layer_0_deviates_by_rounding_only(config: Config) -> None:
    """K and V of layer 0 depend on token and position only: after the shift they are what a prefill computes."""
    num_checked = 0
    for run in outcome(config, "deviation_at_layer_0"):
        selection = run.reply.info.get("selection")
        if selection is not None:
            num_checked += 1
            _, k, v = model(config).project(0, model(config).embed(run.ids), np.arange(len(run.ids)))
            squared_norm = (k**2).sum(axis=(1, 2)) + (v**2).sum(axis=(1, 2))
            assert selection["scores"]["layer"] == 0
            assert selection["scores"]["max"] < 1e-10 * squared_norm.mean()
    assert num_checked >= 4


@on_each_config
def test_only_reused_rows_are_dropped(config: Config) -> None:
    num_dropped = 0
    for case in ("methods", "many_prompts"):
        for run in outcome(config, case):
            for chunk in run.reply.info["chunks"]:
                gone = [p for step in chunk.get("dropped", []) for p in step["positions"]]
                num_dropped += len(gone)
                assert len(gone) == len(set(gone)) <= len(chunk["recomputed_positions"])
                assert not gone or chunk["status"] == "hit"
                assert set(gone) <= set(chunk["recomputed_positions"])
    assert num_dropped > 100


def test_focused_chunks_on_random_masses() -> None:
    import torch

    from sglang_chunk_cache.forward.selection import focus

    rng = random.Random(0)
    for _ in range(5000):
        masses = [rng.choice([rng.random(), rng.random() ** 4, 0.0, 1.0]) for _ in range(rng.randrange(1, 12))]
        found = focus.focused_chunks(torch.tensor(masses, dtype=torch.float64))
        assert frozenset(found.nonzero().flatten().tolist()) == focused_chunks(masses), masses


def test_reference_at_ratio_one_is_a_full_prefill(tmp_path: Path) -> None:
    """Whatever the method: chunks that were computed elsewhere, behind others, and one that is missing."""
    from tiny_models import make_model

    store = Store(Decoder(make_model("llama", tmp_path / "model", layers=4, tokenizer=False)))
    rng = random.Random(0)
    first, second, new, question = ([rng.randrange(10, 500) for _ in range(length)] for length in (20, 31, 9, 5))
    stored = {"prefix_tokens": 0, "chunks": [_miss(3, 23), _miss(23, 54)]}
    spans = [[3, 23], [23, 54]]
    request = {"spans": spans, "method": "full", "ratio": 1.0}
    store.execute([1, 2, 3, *first, *second, *question], request, stored)
    ids = [1, 2, 3, *second, *new, *first, *question]
    spans = [[3, 34], [34, 43], [43, 63]]
    layout = {"prefix_tokens": 3, "chunks": [_hit(3, 34, shift=-20), _miss(34, 43), _hit(43, 63, shift=40)]}
    full = store.full(ids).log_probs
    for method in SELECTING:
        options = {"focus_window": 1, **GROUPING}
        request = {"spans": spans, "method": method, "ratio": 1.0, "options": options}
        assert abs(store.execute(ids, request, layout).log_probs - full).max() < 1e-12, method
        part = store.execute(ids, {**request, "ratio": 0.5, "options": {"group_size": 0}}, layout)
        assert abs(part.log_probs - full).max() > 1e-3, method
        assert 25 <= len(part.selected) <= 36, method


def _miss(start: int, end: int) -> dict[str, Any]:
    return {"start": start, "end": end, "status": "miss", "reused_tokens": 0, "shift": 0}


def _hit(start: int, end: int, *, shift: int) -> dict[str, Any]:
    return {**_miss(start, end), "status": "hit", "reused_tokens": end - start, "shift": shift, "generation": 0}


def test_reference_equals_hugging_face(tmp_path: Path) -> None:
    """The reference is no better than its decoder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from tiny_models import make_model

    ids = [random.Random(0).randrange(10, 500) for _ in range(90)]
    plain = ("qwen2", "qwen3", "gpt_oss", "mistral3", "qwen2_5_vl", "qwen3_vl")
    for kind, rope in (("llama", None), ("llama", "llama3"), ("llama", "yarn"), *((kind, None) for kind in plain)):
        folder = make_model(kind, tmp_path / f"{kind}-{rope}", rope=rope, layers=3, tokenizer=False)
        sees_images = "vision_config" in json.loads((folder / "config.json").read_text())
        auto = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
        network = auto.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, -1]
        expected = torch.log_softmax(logits, dim=-1).numpy()
        assert abs(Store(Decoder(folder)).full(ids).log_probs - expected).max() < 1e-5, (kind, rope)


@pytest.mark.slow
def test_rows_that_leave_are_not_written_with_the_rotation() -> None:
    """A model may write K and V of all rows before its attention; of rows that leave, the reused ones must stay."""
    names = ["rows_leave 0", "rows_leave 1", "rows_leave 2"]
    config = Config(layers=4, kind="qwen3_moe")
    plain, hooked, unhooked = run_cases(
        config, is_ours=True, names=names, module="exactness.fused_write_cases"
    ).values()
    logprobs = [[value for reply in replies for value in reply.logprobs] for replies in (plain, hooked)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)
    assert "its layers write K and V before they attend" in unhooked


@pytest.mark.slow
def test_drift_reads_what_stood_there_before_graphs_write_with_the_rotation() -> None:
    names = ["drift 0", "drift 1", "drift 2"]
    config = Config(layers=4, kind="qwen3_moe")
    plain, by_graphs, unnoted = run_cases(
        config, is_ours=True, names=names, module="exactness.fused_write_cases"
    ).values()
    logprobs = [[value for reply in replies for value in reply.logprobs] for replies in (plain, by_graphs)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)
    assert "its layers write K and V before they attend" in unnoted
