"""question_mass against its float64 definition; what it launches on a GPU."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from sgl_kernel_ext.backend import FP8
from sgl_kernel_ext.question_mass import Questions, question_mass
from unit.kernels.questions import HARD, OPTIONS, alone, build, check, given

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_requests(name, options):
    check(build(HARD[name]), **given(**options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
def test_dtypes(dtype, kv_dtype):
    check(build(HARD["three"], dtype=dtype, kv_dtype=kv_dtype), **given(k_scales=[0.5, 2.0]))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (3, 3), (7, 1), (8, 2)])
def test_heads(num_q_heads, num_kv_heads):
    check(build(HARD["three"], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads), **given())


def test_a_question_gives_each_of_its_rows_once_a_layer():
    problem = build(HARD["three"], num_layers=3)
    found = check(problem, **given())
    for own, start, row_len in zip(
        found.split(problem.questions.kv_lens), problem.questions.starts, problem.questions.row_lens, strict=True
    ):
        assert own.sum().item() == pytest.approx(3 * row_len, rel=1e-5)
        assert (own[start + row_len :] == 0).all()


def test_a_request_is_scored_as_alone():
    problem = build(HARD["three"])
    together = question_mass(*problem, **given())
    for i, own in enumerate(together.split(problem.questions.kv_lens)):
        assert torch.equal(own, question_mass(*alone(problem, i), **given()))


def test_layers_may_be_divided_into_calls():
    problem = build(HARD["three"], num_layers=3)
    total = None
    for part in (slice(0, 1), slice(1, 3)):
        total = question_mass(problem.q[part], problem.k_buffers[part], problem.questions, **given(), added_to=total)
    assert torch.equal(total, question_mass(*problem, **given()))


def test_inputs_are_not_written():
    problem = build(HARD["three"])
    tensors = [problem.q, *problem.k_buffers, problem.questions.kv_slots]
    before = [tensor.clone() for tensor in tensors]
    added_to = torch.ones(len(problem.questions.kv_slots))
    check(problem, **given(logit_cap=3.0), added_to=added_to)
    for tensor, copy in zip([*tensors, added_to], [*before, torch.ones_like(added_to)], strict=True):
        torch.testing.assert_close(tensor, copy, atol=0, rtol=0, equal_nan=True)


def test_rows_are_taken_from_those_of_a_forward():
    asked = Questions([4, 9], [2, 3], [7, 0], [9, 5], torch.arange(14))
    q = torch.arange(24.0).view(12, 2).repeat(1, 2)[:, :2].view(12, 1, 2)
    out = torch.empty(5, 1, 2)
    asked.take(q, out)
    torch.testing.assert_close(out, q[[4, 5, 9, 10, 11]], atol=0, rtol=0)


@needs_triton
@pytest.mark.parametrize("kv_len", [2048, 8192, 131072])
@pytest.mark.parametrize(("num_layers", "num_requests"), [(1, 1), (32, 1), (32, 8)])
def test_three_launches_fill_a_gpu(kv_len, num_layers, num_requests):
    """Questions of 32 rows at an 8B model, and 132 multiprocessors."""
    from test.unit.kernels.absent_gpu import launches_for

    rows, lens = [32] * num_requests, [kv_len] * num_requests
    slots = torch.zeros(kv_len * num_requests, dtype=torch.int64)
    asked = Questions([0] * num_requests, rows, [kv_len - 32] * num_requests, lens, slots)
    q = torch.empty(num_layers, sum(rows), 32, 128, dtype=torch.bfloat16)
    with torch.inference_mode(), launches_for(90, compiles=False) as launches:
        question_mass(q, [torch.empty(1, 8, 128).bfloat16()] * num_layers, asked, sm_scale=0.1, backend="triton")
    assert [launch.kernel for launch in launches] == [
        *("_question_lse_kernel", "_question_received_kernel", "_sum_layers_kernel"),
    ]
    lse, received, _ = (math.prod(launch.grid) for launch in launches)
    assert lse >= min(132, 2 * 8 * num_layers * num_requests * kv_len // 256)
    assert received == kv_len // 32 * num_layers * num_requests


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("q: shape", {"q": torch.zeros(1, 3, 4, 16)}),
        ("q: shape", {"q": torch.zeros(2, 4, 16)}),
        ("q: shape", {"q": torch.zeros(1, 2, 16, 4).transpose(2, 3)}),
        ("k_buffers: 2 layers", {"k_buffers": [torch.zeros(9, 2, 16)] * 2}),
        ("q, k_buffers: shapes", {"k_buffers": [torch.zeros(9, 3, 16)]}),
        ("q, k_buffers: shapes", {"k_buffers": [torch.zeros(9, 2, 8)]}),
        ("k_scales: 2 layers", {"k_scales": [1.0, 1.0]}),
        ("sinks: 0 layers", {"sinks": []}),
        ("sinks: shape", {"sinks": [torch.zeros(2)]}),
        ("added_to: torch.float32 \\(4,\\)", {"added_to": torch.zeros(4)}),
        ("added_to: torch.float64", {"added_to": torch.zeros(5, dtype=torch.float64)}),
    ],
)
def test_bad_arguments_are_named(field, change):
    args = {
        "q": torch.zeros(1, 2, 4, 16),
        "k_buffers": [torch.zeros(9, 2, 16)],
        "questions": Questions([0], [2], [3], [5], torch.arange(5)),
        "sm_scale": 0.25,
    }
    with pytest.raises(ValueError, match=field):
        question_mass(**(args | change))


def test_layers_of_two_layouts_are_two_calls():
    q, asked = torch.zeros(2, 2, 4, 16), Questions([0], [2], [3], [5], torch.arange(5))
    for other in (torch.zeros(9, 2, 16).half(), torch.zeros(9, 1, 16), torch.zeros(9, 3, 16)[:, :2]):
        with pytest.raises(ValueError, match="k_buffers\\[1\\]: another layout"):
            question_mass(q, [torch.zeros(9, 2, 16), other], asked, sm_scale=1.0)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("rows \\[4, 6\\)", {"starts": [4]}),
        ("rows \\[-1, 1\\)", {"starts": [-1]}),
        ("rows \\[3, 3\\)", {"row_lens": [0]}),
        ("kv_slots: torch.int64 \\(4,\\)", {"kv_slots": torch.arange(4)}),
        ("kv_slots: torch.int32", {"kv_slots": torch.arange(5, dtype=torch.int32)}),
    ],
)
def test_questions_that_do_not_fit_are_named(field, change):
    args = {"first_rows": [0], "row_lens": [2], "starts": [3], "kv_lens": [5], "kv_slots": torch.arange(5)}
    with pytest.raises(ValueError, match=field):
        Questions(**(args | change))
