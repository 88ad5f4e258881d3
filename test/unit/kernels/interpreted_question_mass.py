"""question_mass in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sgl_kernel_ext.backend import FP8
from sgl_kernel_ext.question_mass import question_mass
from unit.kernels import questions
from unit.kernels.questions import HARD, OPTIONS, alone, build, given

check = partial(questions.check, backend="triton")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", HARD)
def test_hard_requests(name, options):
    check(build(HARD[name]), **given(**options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
def test_dtypes(dtype, kv_dtype):
    check(build(HARD["three"], dtype=dtype, kv_dtype=kv_dtype), **given(k_scales=[0.5, 2.0]))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(1, 1, 8), (3, 3, 80), (7, 1, 8), (8, 2, 80)])
def test_heads(num_q_heads, num_kv_heads, head_dim):
    requests = HARD["three"]
    check(build(requests, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim), **given())


def test_a_request_is_scored_bit_for_bit_as_alone():
    """And so is each layer, wherever a call ends."""
    problem = build(HARD["long"])
    together = question_mass(*problem, **given(), backend="triton")
    assert torch.equal(together, question_mass(*problem, **given(), backend="triton"))
    for i, own in enumerate(together.split(problem.questions.kv_lens)):
        assert torch.equal(own, question_mass(*alone(problem, i), **given(), backend="triton"))
    total = None
    for layer in range(2):
        one = problem.q[layer : layer + 1], problem.k_buffers[layer : layer + 1], problem.questions
        total = question_mass(*one, **given(), added_to=total, backend="triton")
    assert torch.equal(together, total)


def test_more_pieces_than_a_request_may_have(monkeypatch):
    """Pieces are longer then; a question reaches over several tiles of rows."""
    from sgl_kernel_ext.question_mass import triton as kernels

    monkeypatch.setattr(kernels, "_MIN_PIECE_LEN", 64)
    monkeypatch.setattr(kernels, "_MAX_PIECES", 4)
    problem = build([(300, 230, 40), (20, 10, 5)])
    assert kernels._num_pieces(270) == 3
    check(problem, **given())


def test_buffers_that_are_parts_of_wider_ones():
    problem = build(HARD["three"])
    wide = [torch.full((len(buffer), 5, 16), float("nan")) for buffer in problem.k_buffers]
    for one, buffer in zip(wide, problem.k_buffers, strict=True):
        one[:, 1:3] = buffer
    check(problem._replace(k_buffers=[one[:, 1:3] for one in wide]), **given())


def test_a_last_dimension_that_is_not_dense_is_refused():
    problem = build(HARD["three"])
    strided = [buffer.transpose(1, 2).contiguous().transpose(1, 2) for buffer in problem.k_buffers]
    with pytest.raises(ValueError, match="k_buffers\\[0\\]: stride"):
        question_mass(problem.q, strided, problem.questions, sm_scale=1.0, backend="triton")
