"""sparse_extend in torch against its float64 definition."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext import sparse_extend
from sgl_kernel_ext.sparse_extend import PrivateKeys, SparseExtend, exclude_shared
from sgl_kernel_ext.sparse_extend.naive import sparse_extend_reference
from sgl_kernel_ext.sparse_extend.torch_blocked import cut_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(problem, *, sm_scale=0.25, logit_cap=0.0, window=-1, sinks=None, tolerance=None):
    """The result is written in `out`, whole, and is the reference's within the rounding of the dtype."""
    options = {"sm_scale": sm_scale, "logit_cap": logit_cap, "window": window, "sinks": sinks}
    result = sparse_extend(*problem.inputs, **options, backend="torch", out=problem.out)
    assert result is problem.out
    expected = sparse_extend_reference(*problem.inputs, **options)
    assert not expected.isnan().any()
    tolerance = tolerance or TOLERANCE[problem.q.dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_hard_requests_in_one_call(make_problem, hard_requests, dtype, logit_cap):
    check(make_problem(hard_requests, dtype=dtype), logit_cap=logit_cap)


@pytest.mark.parametrize("window", [0, 1, 30, 63, 64, 500])
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
def test_windows(make_problem, hard_requests, logit_cap, window):
    rows = [1, 4, 90, *range(100, 400), 450, 460, *range(500, 800), 810, 1199]
    check(make_problem([*hard_requests, (1200, rows)]), logit_cap=logit_cap, window=window)


@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize(("dtype", "logit_cap"), [(torch.float32, 0.0), (torch.float32, 3.0), (torch.bfloat16, 0.0)])
def test_sinks(make_problem, hard_requests, dtype, logit_cap, window):
    """Of the size of scores, far above them, and far below, where they are as good as none."""
    rows = [1, 4, 90, *range(100, 400), 450, 460, *range(500, 800), 810, 1199]
    problem = make_problem([*hard_requests, (1200, rows)], dtype=dtype, num_q_heads=6)
    sinks = torch.tensor([0.5, -1.0, 9.0, -60.0, 3.0, 0.0], dtype=torch.bfloat16)
    check(problem, logit_cap=logit_cap, window=window, sinks=sinks)


def test_sinks_of_other_heads_are_an_error(make_problem):
    with pytest.raises(ValueError, match=r"sinks: shape \(3,\), need one of each query head, \[4\]"):
        check(make_problem([(5, [4])]), sinks=torch.zeros(3))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 3), (4, 2), (6, 2), (8, 1), (12, 1)])
def test_grouped_query_heads(make_problem, hard_requests, num_q_heads, num_kv_heads):
    check(make_problem(hard_requests, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(make_problem, head_dim):
    check(make_problem([(50, [0, 13, 49])], head_dim=head_dim), sm_scale=head_dim**-0.5)


def test_value_heads_of_another_size(make_problem, hard_requests):
    check(make_problem([*hard_requests, (300, list(range(300)))], head_dim=24, v_head_dim=40))


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (6, 2)])
def test_long_runs_between_scattered_rows(make_problem, dtype, contiguous, num_q_heads, num_kv_heads):
    whole = (300, list(range(300)))
    tail = (700, list(range(400, 700)))
    mixed = (1200, [1, 4, 90, *range(100, 400), 450, 460, *range(500, 800), 810, 1199])
    problem = make_problem(
        [whole, tail, mixed],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        contiguous=contiguous,
    )
    check(problem)


@pytest.mark.parametrize("run_len", [31, 32, 33, 120, 499])
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 3), (6, 2)])
def test_slots_in_runs(make_problem, hard_requests, run_len, logit_cap, num_q_heads, num_kv_heads):
    """Stored chunks lie in runs of slots, which are copied as such; K and V of other sizes, and few rows too."""
    scattered = torch.randperm(900, generator=torch.Generator().manual_seed(3))[:200].sort().values.tolist()
    check(
        make_problem(
            [*hard_requests, (901, scattered), (1200, [5, *range(700, 1100)])],
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            v_head_dim=24 if run_len == 33 else None,
            run_len=run_len,
        ),
        logit_cap=logit_cap,
    )


def test_many_scattered_rows_take_several_blocks(make_problem):
    positions = torch.randperm(900, generator=torch.Generator().manual_seed(3))[:200].sort().values.tolist()
    check(make_problem([(901, positions)]))


def test_large_scores_do_not_overflow(make_problem, hard_requests):
    # Scores near 1,000 are known to 1e-4 in fp32: that is what the weights can be off by.
    check(make_problem(hard_requests), sm_scale=40.0, tolerance=1e-3)


def test_last_row_of_a_long_prompt(make_problem):
    check(make_problem([(70_001, [0, 65_535, 65_536, 70_000])], num_q_heads=2, num_kv_heads=1))


def test_strided_q_and_out(make_problem, hard_requests):
    """q and out cut out of wider tensors, as a fused projection and a padded batch give them."""
    problem = make_problem(hard_requests)
    num_rows, num_q_heads, head_dim = problem.q.shape
    wide_q = torch.full((num_rows, num_q_heads + 3, head_dim), float("nan"))
    wide_q[:, :num_q_heads] = problem.q
    wide_out = torch.full((num_rows + 2, num_q_heads + 3, head_dim), -7.0)
    sparse_extend(
        wide_q[:, :num_q_heads],
        *problem.inputs[1:],
        sm_scale=0.25,
        backend="torch",
        out=wide_out[:num_rows, :num_q_heads],
    )
    expected = sparse_extend_reference(*problem.inputs, sm_scale=0.25)
    torch.testing.assert_close(wide_out[:num_rows, :num_q_heads].double(), expected, atol=1e-5, rtol=1e-5)
    assert (wide_out[num_rows:] == -7.0).all()
    assert (wide_out[:, num_q_heads:] == -7.0).all()


def test_buffers_of_a_wider_dtype_and_tensor_indptr(make_problem, hard_requests):
    problem = make_problem(hard_requests)
    q, k, v, kv_indptr, kv_indices, row_indptr, positions = problem.inputs
    args = (q.bfloat16(), k, v, torch.tensor(kv_indptr), kv_indices, torch.tensor(row_indptr), positions)
    result = sparse_extend(*args, sm_scale=0.25)
    assert result.dtype == torch.bfloat16
    expected = sparse_extend_reference(*args, sm_scale=0.25)
    torch.testing.assert_close(result.double(), expected, atol=3e-2, rtol=3e-2)


def test_result_does_not_depend_on_the_other_rows(make_problem):
    """Dropping rows changes nothing for the rows that stay: what early termination relies on."""
    problem = make_problem([(500, list(range(500)))])
    full = sparse_extend(*problem.inputs, sm_scale=0.25)
    kept = torch.tensor([0, 7, 250, 251, 252, 499])
    few = sparse_extend(
        problem.q[kept], *problem.inputs[1:5], [0, len(kept)], problem.row_positions[kept], sm_scale=0.25
    )
    torch.testing.assert_close(few, full[kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_private_keys_stand_in_the_place_of_shared_ones(make_problem, as_tensor):
    """Two requests share a chunk's slots; each has other rows of its own. What is excluded is poisoned."""
    problem = make_problem([(40, [3, 17, 39]), (40, [8, 39])], num_q_heads=4, num_kv_heads=2)
    q, k, v, kv_indptr, kv_indices, row_indptr, positions = problem.inputs
    positions_of = torch.tensor([3, 17, 8, 30, 31])
    at = positions_of + torch.tensor([0, 0, 40, 40, 40])
    own = kv_indices[at]
    shared = torch.arange(k.shape[0], k.shape[0] + len(at))  # slots of NaN
    k, v = (torch.cat([x, torch.full((len(at), *x.shape[1:]), float("nan"))]) for x in (k, v))
    listed = kv_indices.clone()
    listed[at] = shared
    indptr = [0, 2, 5]
    private = PrivateKeys(torch.tensor(indptr) if as_tensor else indptr, positions_of, own)
    args = (row_indptr, positions)
    expected = sparse_extend(q, k, v, kv_indptr, kv_indices, *args, sm_scale=0.25)
    result = sparse_extend(q, k, v, kv_indptr, listed, *args, sm_scale=0.25, private=private)
    assert torch.equal(result, expected)
    assert torch.equal(listed[at], shared), "the list of shared slots must not change"
    assert torch.equal(exclude_shared(torch.tensor(kv_indptr), listed, private), kv_indices)


@pytest.mark.parametrize(
    ("field", "private"),
    [
        ("private.indptr", PrivateKeys([0, 1, 2], torch.tensor([1, 2]), torch.tensor([3, 4]))),
        ("private.slots", PrivateKeys([0, 2], torch.tensor([1, 2]), torch.tensor([3]))),
        ("private.positions", PrivateKeys([0, 1], torch.tensor([1], dtype=torch.int32), torch.tensor([3]))),
    ],
)
def test_bad_private_keys_are_named(make_problem, field, private):
    with pytest.raises(ValueError, match=field):
        sparse_extend(*make_problem([(9, [4])]).inputs, sm_scale=1.0, private=private)


def test_no_rows(make_problem):
    problem = make_problem([(5, []), (9, [])])
    assert sparse_extend(*problem.inputs, sm_scale=1.0).shape == (0, 4, 16)


@pytest.mark.parametrize("num_steps", [90, 400, 3000])
@pytest.mark.parametrize("seed", range(10))
def test_cut_covers_every_row_once(seed, num_steps):
    rng = torch.Generator().manual_seed(seed)
    jumps = torch.randint(1, 50, (num_steps,), generator=rng)
    steps = torch.where(torch.rand(num_steps, generator=rng) < 0.997, 1, jumps)
    positions = steps.cumsum(0).tolist()
    at, num_runs = 0, 0
    for start, stop, is_run in cut_rows(positions, can_run=True):
        assert start == at < stop
        if is_run:
            num_runs += 1
            assert positions[stop - 1] - positions[start] == stop - 1 - start >= 255
        at = stop
    assert at == num_steps
    assert num_runs or num_steps < 3000
    assert not any(is_run for _, _, is_run in cut_rows(positions, can_run=False))


def test_layers_share_what_depends_on_positions(make_problem, hard_requests):
    """Layers of one forward: with and without a cap, other head sizes, other values."""
    problem = make_problem(hard_requests)
    attention = SparseExtend(*problem.inputs[3:], backend="torch")
    for logit_cap in (0.0, 3.0, 0.0):
        q, k, v = (torch.randn_like(x) for x in problem.inputs[:3])
        k, v = (x.nan_to_num(0.0) for x in (k, v))
        expected = sparse_extend_reference(q, k, v, *problem.inputs[3:], sm_scale=0.25, logit_cap=logit_cap)
        result = attention(q, k, v, sm_scale=0.25, logit_cap=logit_cap)
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("row_positions: those of request 0", {"row_positions": torch.tensor([3, 3])}),
        ("row_positions: those of request 0", {"row_positions": torch.tensor([2, 10])}),
        ("row_positions: those of request 0", {"row_positions": torch.tensor([-1, 2])}),
        ("row_positions: 3 entries", {"row_positions": torch.tensor([1, 2, 3])}),
        ("kv_indices", {"kv_indices": torch.arange(10, dtype=torch.int32)}),
        ("kv_indptr, row_indptr", {"kv_indptr": [0, 11]}),
        ("row_indptr", {"row_indptr": [0, 1, 2]}),
        ("q: ", {"q": torch.zeros(2, 3, 16)}),
        ("k_buffer", {"k_buffer": torch.zeros(20, 2, 16, dtype=torch.int8)}),
        ("v_buffer", {"v_buffer": torch.zeros(20, 1, 16)}),
        ("out", {"out": torch.zeros(2, 4, 8)}),
        ("backend", {"backend": "cuda"}),
    ],
)
def test_bad_arguments_are_named(field, change):
    args = {
        "q": torch.zeros(2, 4, 16),
        "k_buffer": torch.zeros(20, 2, 16),
        "v_buffer": torch.zeros(20, 2, 16),
        "kv_indptr": [0, 10],
        "kv_indices": torch.arange(10),
        "row_indptr": [0, 2],
        "row_positions": torch.tensor([4, 9]),
        "sm_scale": 0.25,
    }
    with pytest.raises(ValueError, match=field):
        sparse_extend(**(args | change))


def test_flashinfer_is_asked_for_what_it_cannot(make_problem):
    with pytest.raises(ValueError, match='q: on cpu, need CUDA; use backend "triton"'):
        sparse_extend(*make_problem([(9, [4])]).inputs, sm_scale=1.0, backend="flashinfer")
