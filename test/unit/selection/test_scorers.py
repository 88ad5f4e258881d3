"""Scorers: each method that chooses during the forward has one, and it is what its paper says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from chunk_cache.methods import METHODS, Stage
from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sgl_kernel_ext.backend import FP8
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference
from sgl_kernel_ext.question_mass import Questions
from sglang_chunk_cache.forward.selection.scorer import AskedLayers, RowsAtLayer, scorer_of
from sglang_chunk_cache.kv.layer_kv import LayerKV
from sglang_chunk_cache.kv.ranks import sum_over_ranks

KV_LEN, NUM_SLOTS = 40, 64
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 16
QUESTION = [36, 37, 38, 39]
POSITIONS = [2, 3, 7, 11, 12, 20, 33, *QUESTION]


def make_rows(seed: int = 0) -> RowsAtLayer:
    """Eleven rows, the last four of the question; slots scattered, those that nothing was written to hold NaN."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    slots = torch.randperm(NUM_SLOTS, generator=rng)[:KV_LEN]
    k_buffer, v_buffer = (torch.full((NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM), float("nan")) for _ in range(2))
    k_buffer[slots], v_buffer[slots] = normal(KV_LEN, NUM_KV_HEADS, HEAD_DIM), normal(KV_LEN, NUM_KV_HEADS, HEAD_DIM)
    num_rows = len(POSITIONS)
    return RowsAtLayer(
        q=normal(num_rows, NUM_Q_HEADS, HEAD_DIM),
        k=normal(num_rows, NUM_KV_HEADS, HEAD_DIM),
        v=normal(num_rows, NUM_KV_HEADS, HEAD_DIM),
        positions=torch.tensor(POSITIONS),
        num_question=len(QUESTION),
        num_answer=0,
        kv_slots=slots,
        stored=LayerKV(k_buffer, v_buffer),
        sm_scale=HEAD_DIM**-0.5,
        logit_cap=0.0,
        tp_size=1,
    )


def question_of(*requests: RowsAtLayer) -> AskedLayers:
    """The questions of these rows at one layer, once the K of all of them is written; no requests share a slot."""
    first = requests[0]
    buffers, slots = [], []
    for i, rows in enumerate(requests):
        k = rows.stored.k.clone()
        k[rows.slots()] = rows.k.to(k.dtype)
        buffers.append(k)
        slots.append(rows.kv_slots + i * NUM_SLOTS)
    num = len(requests)
    asked = Questions([0] * num, [len(QUESTION)] * num, [QUESTION[0]] * num, [KV_LEN] * num, torch.cat(slots))
    return AskedLayers(
        q=torch.cat([rows.question_q for rows in requests])[None],
        questions=asked,
        stored=[dataclasses.replace(first.stored, k=torch.cat(buffers))],
        sm_scale=first.sm_scale,
        logit_cap=first.logit_cap,
        sinks=None if first.sinks is None else [first.sinks],
        so_far=None,
        kernel="auto",
    )


def seen_by(name: str, rows: RowsAtLayer) -> RowsAtLayer | AskedLayers:
    return rows if name in LEAVING else question_of(rows)


def received_of_question(rows: RowsAtLayer, *, squared: bool = False) -> torch.Tensor:
    """[kv_len]: what the question gives to each position, keys of the rows as just computed."""
    keys = torch.stack([rows.stored.k[slot] for slot in rows.kv_slots.tolist()])
    for row, position in enumerate(POSITIONS):
        keys[position] = rows.k[row]
    received, _ = attention_mass_reference(
        rows.q[-len(QUESTION) :],
        keys,
        torch.tensor(QUESTION),
        sm_scale=rows.sm_scale,
        logit_cap=rows.logit_cap,
        squared=squared,
        sinks=rows.sinks,
    )
    return received


def expected(method: str, rows: RowsAtLayer) -> torch.Tensor:
    if method == "cacheblend":
        return kv_deviation_reference(rows.k, rows.v, rows.stored.k, rows.stored.v, slots=rows.slots())
    return received_of_question(rows, squared=method == "infoflow")


SCORED = [name for name, method in METHODS.items() if method.stage is not Stage.BEFORE]
LEAVING = [name for name in SCORED if METHODS[name].stage is Stage.LAYER and METHODS[name].last_asked_layer(()) is None]


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_score_have_a_scorer_and_the_others_none(name: str) -> None:
    if METHODS[name].stage is Stage.BEFORE:
        with pytest.raises((ImportError, AttributeError)):
            scorer_of(name)
        return
    scorer = scorer_of(name)
    is_shared = name in ("a3", "fusionrag", "question-drift")
    assert scorer.__module__.endswith(f".{'scorer' if is_shared else name.replace('-', '_')}")
    assert scorer.__doc__


@pytest.mark.parametrize("name", SCORED)
def test_shape_and_promises_of_a_scorer(name: str) -> None:
    rows = seen_by(name, make_rows())
    before = {
        field.name: getattr(rows, field.name).clone()
        for field in dataclasses.fields(rows)
        if isinstance(getattr(rows, field.name), torch.Tensor)
    }
    scores = scorer_of(name)(rows)
    num_scores = len(POSITIONS) if name in LEAVING else KV_LEN
    assert (scores.dtype, scores.shape) == (torch.float32, (num_scores,))
    assert scores.isfinite().all()
    for field, tensor in before.items():
        torch.testing.assert_close(getattr(rows, field), tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 4, NUM_Q_HEADS)], ids=["", "sinks"])
@pytest.mark.parametrize("logit_cap", [0.0, 2.0])
@pytest.mark.parametrize("name", ["cacheblend", "a3", "fusionrag", "infoflow"])
def test_scores_equal_the_definition(name: str, logit_cap: float, sinks: torch.Tensor | None) -> None:
    for seed in range(3):
        rows = dataclasses.replace(make_rows(seed), logit_cap=logit_cap, sinks=sinks)
        found = scorer_of(name)(seen_by(name, rows))
        torch.testing.assert_close(found.double(), expected(name, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["a3", "fusionrag", "infoflow"])
def test_each_question_scores_the_keys_of_its_own_request(name: str) -> None:
    requests = [make_rows(seed) for seed in range(3)]
    apart = torch.cat([expected(name, rows) for rows in requests])
    torch.testing.assert_close(scorer_of(name)(question_of(*requests)).double(), apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["a3", "fusionrag", "infoflow"])
def test_layers_add_up(name: str) -> None:
    asked = question_of(make_rows())
    alone = scorer_of(name)(asked)
    both = dataclasses.replace(asked, q=torch.cat([asked.q, asked.q]), stored=[*asked.stored, *asked.stored])
    for found in (scorer_of(name)(both), scorer_of(name)(dataclasses.replace(asked, so_far=alone))):
        torch.testing.assert_close(found, 2 * alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", FP8)
def test_what_is_stored_in_fp8_is_scaled(dtype: torch.dtype) -> None:
    """As if the pool held the numbers that are meant."""
    name, rows = "cacheblend", make_rows()
    k_scale, v_scale = 0.5, 0.125
    stored = LayerKV(rows.stored.k.div(k_scale).to(dtype), rows.stored.v.div(v_scale).to(dtype), k_scale, v_scale)
    meant = LayerKV(stored.k.float() * k_scale, stored.v.float() * v_scale)
    found, expected_scores = (scorer_of(name)(dataclasses.replace(rows, stored=one)) for one in (stored, meant))
    torch.testing.assert_close(found, expected_scores, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, scorer_of(name)(dataclasses.replace(rows, stored=LayerKV(stored.k, stored.v))))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("name", ["fusionrag", "a3"])
def test_a_question_reads_keys_in_fp8_with_their_scale(name: str, dtype: torch.dtype) -> None:
    rows = make_rows()
    rows = dataclasses.replace(rows, stored=LayerKV(rows.stored.k.div(0.5).to(dtype), rows.stored.v, 0.5))
    rows = dataclasses.replace(rows, k=rows.stored.k[rows.slots()].float())  # as stored
    meant = dataclasses.replace(rows, k=rows.k * 0.5, stored=LayerKV(rows.stored.k.float() * 0.5, rows.stored.v))
    found, expected_scores = (scorer_of(name)(question_of(one)) for one in (rows, meant))
    torch.testing.assert_close(found, expected_scores, atol=1e-5, rtol=1e-5)


def test_cacheblend_may_compare_v_alone() -> None:
    rows = dataclasses.replace(make_rows(), options=(("deviation", "v"),))
    no_k = rows.k[..., :0]
    deviation = kv_deviation_reference(no_k, rows.v, rows.stored.k[..., :0], rows.stored.v, slots=rows.slots())
    torch.testing.assert_close(scorer_of("cacheblend")(rows).double(), deviation, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", SCORED)
def test_scores_of_the_ranks_add_up_to_those_of_all_heads(name: str, tp_size: int) -> None:
    rows = make_rows()
    parts = []
    for rank in range(tp_size):
        q_heads = slice(rank * NUM_Q_HEADS // tp_size, (rank + 1) * NUM_Q_HEADS // tp_size)
        kv_heads = slice(rank * NUM_KV_HEADS // tp_size, (rank + 1) * NUM_KV_HEADS // tp_size)
        part = dataclasses.replace(
            rows,
            q=rows.q[:, q_heads],
            k=rows.k[:, kv_heads],
            v=rows.v[:, kv_heads],
            stored=LayerKV(rows.stored.k[:, kv_heads], rows.stored.v[:, kv_heads]),
            tp_size=tp_size,
        )
        parts.append(scorer_of(name)(seen_by(name, part)))
    total = sum(parts) if name in LEAVING else sum(parts) / tp_size  # by `QuestionPass`
    torch.testing.assert_close(total, scorer_of(name)(seen_by(name, rows)), atol=1e-5, rtol=1e-5)


def test_one_rank_has_nothing_to_add() -> None:
    values = torch.arange(3.0)
    assert sum_over_ranks(values, 1) is values


def test_the_question_is_the_end_of_the_rows() -> None:
    rows = make_rows()
    assert rows.question_positions.tolist() == QUESTION
    torch.testing.assert_close(rows.question_q, rows.q[-4:], rtol=0, atol=0)
    assert len(dataclasses.replace(rows, num_question=0).question_q) == 0


def test_the_answer_stands_behind_the_question() -> None:
    rows = dataclasses.replace(make_rows(), num_question=2, num_answer=1)
    assert rows.question_positions.tolist() == QUESTION[-3:-1]
    torch.testing.assert_close(rows.question_q, rows.q[-3:-1], rtol=0, atol=0)


def test_keys_are_those_of_the_slots_but_of_rows_as_just_computed() -> None:
    rows = make_rows()
    keys = rows.keys()
    expected_keys = [rows.stored.k[slot] for slot in rows.kv_slots.tolist()]
    for row, position in enumerate(POSITIONS):
        expected_keys[position] = rows.k[row]
    torch.testing.assert_close(keys, torch.stack(expected_keys), rtol=0, atol=0)
    assert rows.slots().tolist() == [int(rows.kv_slots[position]) for position in POSITIONS]
