"""sparse_extend in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib

import pytest
import torch

from sgl_kernel_ext import sparse_extend
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(problem, *, sm_scale=0.25, logit_cap=0.0, window=-1, sinks=None, tolerance=None):
    options = {"sm_scale": sm_scale, "logit_cap": logit_cap, "window": window, "sinks": sinks}
    sparse_extend(*problem.inputs, **options, backend="triton", out=problem.out)
    expected = sparse_extend_reference(*problem.inputs, **options)
    tolerance = tolerance or TOLERANCE[problem.q.dtype]
    torch.testing.assert_close(problem.out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_hard_requests_in_one_launch(make_problem, hard_requests, dtype, logit_cap):
    check(make_problem(hard_requests, dtype=dtype), logit_cap=logit_cap)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 3), (4, 2), (6, 2), (8, 1), (12, 1), (40, 1)])
def test_grouped_query_heads(make_problem, num_q_heads, num_kv_heads):
    problem = make_problem([(35, [0, 20, 34]), (1, [0])], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    check(problem)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (80, 40)]
)
def test_head_dims(make_problem, head_dim, v_head_dim):
    problem = make_problem([(50, [0, 13, 49])], head_dim=head_dim, v_head_dim=v_head_dim)
    check(problem, sm_scale=head_dim**-0.5)


@pytest.mark.parametrize("window", [0, 30, 63, 64, 500])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_windows(make_problem, hard_requests, monkeypatch, num_splits, window):
    kernel = importlib.import_module("sgl_kernel_ext.sparse_extend.triton")
    monkeypatch.setattr(kernel, "choose_splits", lambda *_: num_splits)
    check(make_problem([*hard_requests, (400, [0, 1, 63, 64, *range(200, 290), 399])]), window=window)
    check(make_problem([(200, [3, 199])], num_q_heads=6, num_kv_heads=2), logit_cap=3.0, window=window)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks(make_problem, hard_requests, monkeypatch, num_splits):
    """A sink counts once, also where keys are split, and where a share has no key that the row sees."""
    kernel = importlib.import_module("sgl_kernel_ext.sparse_extend.triton")
    monkeypatch.setattr(kernel, "choose_splits", lambda *_: num_splits)
    sinks = torch.tensor([0.5, -1.0, 9.0, -60.0, 3.0, 0.0], dtype=torch.bfloat16)
    requests = [*hard_requests, (400, [0, 1, 63, 64, *range(200, 290), 399])]
    for window, logit_cap in ((-1, 0.0), (30, 0.0), (-1, 3.0)):
        check(make_problem(requests, num_q_heads=6), window=window, logit_cap=logit_cap, sinks=sinks)


@pytest.mark.parametrize(("dtype", "num_splits"), [(torch.float32, 2), (torch.float32, 32), (torch.bfloat16, 4)])
def test_split_keys(make_problem, hard_requests, monkeypatch, dtype, num_splits):
    """More shares than blocks of keys, shares that a row sees nothing of, requests of one key."""
    # By import_module: the package's attribute of this name is the function.
    kernel = importlib.import_module("sgl_kernel_ext.sparse_extend.triton")
    monkeypatch.setattr(kernel, "choose_splits", lambda *_: num_splits)
    check(make_problem([*hard_requests, (400, [0, 1, 63, 64, 399])], dtype=dtype))
    check(make_problem([(400, [3, 399])], num_q_heads=6, num_kv_heads=2, head_dim=24, v_head_dim=40), logit_cap=3.0)


def test_split_keys_into_a_strided_out(make_problem, hard_requests, monkeypatch):
    kernel = importlib.import_module("sgl_kernel_ext.sparse_extend.triton")
    monkeypatch.setattr(kernel, "choose_splits", lambda *_: 4)
    problem = make_problem(hard_requests)
    num_rows, num_q_heads, head_dim = problem.q.shape
    wide_out = torch.full((num_rows + 2, num_q_heads + 3, head_dim), -7.0)
    sparse_extend(*problem.inputs, sm_scale=0.25, backend="triton", out=wide_out[:num_rows, :num_q_heads])
    expected = sparse_extend_reference(*problem.inputs, sm_scale=0.25)
    torch.testing.assert_close(wide_out[:num_rows, :num_q_heads].double(), expected, atol=1e-5, rtol=1e-5)
    assert (wide_out[num_rows:] == -7.0).all()
    assert (wide_out[:, num_q_heads:] == -7.0).all()


@pytest.mark.parametrize("num_requests", [1, 2, 3, 5, 8, 9])
def test_every_tile_finds_its_request(make_problem, num_requests):
    requests = [(n * 7 + 3, list(range(0, n * 7 + 3, 1 + n % 3))) for n in range(num_requests)]
    check(make_problem(requests, num_q_heads=2, num_kv_heads=1))


def test_requests_without_rows_on_both_ends(make_problem):
    check(make_problem([(9, []), (9, [4]), (9, []), (9, []), (9, [0, 8]), (9, [])]))


def test_large_scores_do_not_overflow(make_problem, hard_requests):
    # Scores near 1,000 are known to 1e-4 in fp32: that is what the weights can be off by.
    check(make_problem(hard_requests), sm_scale=40.0, tolerance=1e-3)


def test_large_scores_under_a_cap(make_problem, hard_requests):
    check(make_problem(hard_requests), sm_scale=400.0, logit_cap=30.0, tolerance=1e-3)


def test_positions_past_65536(make_problem, monkeypatch):
    """All positions share 64 slots: only the indices are long. Wide tiles, as the interpreter pays for each step."""
    # By import_module: the package's attribute of this name is the function.
    kernel = importlib.import_module("sgl_kernel_ext.sparse_extend.triton")
    monkeypatch.setattr(kernel, "choose_tile", lambda *_, **__: kernel.Tile(16, 512, 4, 2))
    small = make_problem([(64, [63])], num_q_heads=1, num_kv_heads=1)
    kv_indices = torch.arange(65_600) % 64
    kv_indices = small.kv_indices[kv_indices]
    q = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([65_540, 65_599])
    args = (q, small.k_buffer, small.v_buffer, [0, 65_600], kv_indices, [0, 2], positions)
    result = sparse_extend(*args, sm_scale=0.25, backend="triton")
    expected = sparse_extend_reference(*args, sm_scale=0.25)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_strided_q_and_out(make_problem, hard_requests):
    problem = make_problem(hard_requests)
    num_rows, num_q_heads, head_dim = problem.q.shape
    wide_q = torch.full((num_rows, num_q_heads + 3, head_dim), float("nan"))
    wide_q[:, :num_q_heads] = problem.q
    wide_out = torch.full((num_rows + 2, num_q_heads + 3, head_dim), -7.0)
    sparse_extend(
        wide_q[:, :num_q_heads],
        *problem.inputs[1:],
        sm_scale=0.25,
        backend="triton",
        out=wide_out[:num_rows, :num_q_heads],
    )
    expected = sparse_extend_reference(*problem.inputs, sm_scale=0.25)
    torch.testing.assert_close(wide_out[:num_rows, :num_q_heads].double(), expected, atol=1e-5, rtol=1e-5)
    assert (wide_out[num_rows:] == -7.0).all()
    assert (wide_out[:, num_q_heads:] == -7.0).all()


def test_a_last_dimension_that_is_not_dense_is_refused(make_problem):
    problem = make_problem([(9, [4])])
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="q: stride"):
        sparse_extend(q, *problem.inputs[1:], sm_scale=1.0, backend="triton")
