"""attention_mass against its float64 definition."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import pytest
import torch

from sgl_kernel_ext import attention_mass as module
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.attention_mass.naive import attention_mass_reference

# Bounds on the error of a weight; those of half precision allow for scores that were rounded to it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


@dataclass(frozen=True)
class Problem:
    """Arguments of `attention_mass`; keys that no row sees hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    row_positions: torch.Tensor

    @property
    def inputs(self) -> tuple:
        return self.q, self.k, self.row_positions


def build(
    kv_len: int,
    positions: list[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(len(positions), num_q_heads, head_dim, generator=rng).to(dtype)
    k = torch.randn(kv_len, num_kv_heads, head_dim, generator=rng).to(dtype)
    k[max(positions, default=-1) + 1 :] = float("nan")
    return Problem(q, k, torch.tensor(positions, dtype=torch.int64))


def check(problem: Problem, *, sm_scale=0.25, tolerance=None, **given):
    """Both results are the reference's, within `tolerance`."""
    received, by_segment = attention_mass(*problem.inputs, sm_scale=sm_scale, **given)
    expected, expected_by_segment = attention_mass_reference(*problem.inputs, sm_scale=sm_scale, **given)
    tolerance = tolerance or TOLERANCE[problem.q.dtype]
    assert (received.dtype, received.shape) == (torch.float32, (len(problem.k),))
    assert not expected.isnan().any()
    torch.testing.assert_close(received.double(), expected, atol=tolerance, rtol=tolerance)
    assert (by_segment is None) == (expected_by_segment is None)
    if by_segment is not None:
        assert (by_segment.dtype, by_segment.shape) == (torch.float32, expected_by_segment.shape)
        torch.testing.assert_close(by_segment.double(), expected_by_segment, atol=tolerance, rtol=tolerance)
    return received, by_segment


# (kv_len, row positions): one key; one row; first and last position; scattered; all; unordered and repeated.
HARD = [
    (1, [0]),
    (33, [32]),
    (33, [0]),
    (67, [0, 1, 5, 31, 32, 33, 64, 66]),
    (129, [3, *range(60, 101)]),
    (40, list(range(40))),
    (50, [49, 3, 3, 20]),
]


@pytest.mark.parametrize(("kv_len", "positions"), HARD)
@pytest.mark.parametrize("skip_self", [False, True])
def test_rows_give_nothing_in_front_of_their_start(kv_len, positions, skip_self, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS_CPU", 4 * kv_len * 3)  # three rows a block
    problem = build(kv_len, positions)
    row_starts = torch.tensor([position - position % 7 for position in positions])
    check(problem, segment_starts=[0, kv_len // 2], skip_self=skip_self, row_starts=row_starts)


def test_triton_refuses_row_starts():
    problem = build(8, [3, 5])
    with pytest.raises(ValueError, match="row_starts"):
        attention_mass(*problem.inputs, sm_scale=0.25, row_starts=torch.tensor([0, 4]), backend="triton")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("starts", [None, [0, 300]], ids=["question", "a long segment"])
@pytest.mark.parametrize("kv_len", [8192, 32768, 131072])
def test_a_few_rows_fill_a_gpu(kv_len, starts):
    """A question at an 8B model: 32 rows, and 132 multiprocessors."""
    from test.unit.kernels.absent_gpu import launches_for

    heads = 32 if starts is None else 2
    q, k = torch.empty(32, heads, 128).bfloat16(), torch.empty(kv_len, min(8, heads), 128, dtype=torch.bfloat16)
    rows = torch.arange(kv_len - 32, kv_len)
    with torch.inference_mode(), launches_for(90, compiles=False) as launches:
        attention_mass(q, k, rows, sm_scale=0.1, segment_starts=starts, backend="triton")
    assert [launch.kernel for launch in launches] == ["_lse_kernel", "_join_kernel", "_received_kernel"]
    programs = math.prod(launches[0].grid)
    assert min(132, kv_len * heads // 256) <= programs <= 600


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_len", "positions"), HARD)
def test_hard_rows(kv_len, positions, dtype, logit_cap):
    problem = build(kv_len, positions, dtype=dtype)
    check(problem, logit_cap=logit_cap, segment_starts=[0, kv_len // 3, kv_len // 2])


@pytest.mark.parametrize("given", [{}, {"skip_self": True}, {"logit_cap": 3.0}], ids=str)
@pytest.mark.parametrize(("kv_len", "positions"), HARD)
def test_sinks_take_a_share_of_every_row(kv_len, positions, given):
    problem = build(kv_len, positions)
    sinks = torch.tensor([-3.0, 0.5, 2.0, 4.0]).bfloat16()
    _, by_segment = check(problem, segment_starts=[0, kv_len // 2], sinks=sinks, **given)
    assert (by_segment.sum(1) < 1).all()


def test_the_mass_of_a_row_with_a_sink_is_the_formula():
    problem = build(9, [4, 8], num_q_heads=2, num_kv_heads=1)
    sinks = torch.tensor([1.0, 2.0])
    shares = torch.einsum("rhd,kd->rhk", problem.q, problem.k[:, 0]).mul(0.25).exp()
    shares[0, :, 5:] = 0
    expected = (shares / (shares.sum(-1, keepdim=True) + sinks.exp()[:, None])).mean(1)
    received, by_segment = attention_mass(*problem.inputs, sm_scale=0.25, segment_starts=[0, 3], sinks=sinks)
    torch.testing.assert_close(received, expected.sum(0))
    torch.testing.assert_close(by_segment, torch.stack([expected[:, :3].sum(1), expected[:, 3:].sum(1)], 1))


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_query_heads(num_q_heads, num_kv_heads, dtype):
    problem = build(45, [3, 17, 18, 44], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    check(problem, segment_starts=[0, 20])


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_head_dims(head_dim):
    check(build(50, [0, 13, 49], head_dim=head_dim), sm_scale=head_dim**-0.5)


@pytest.mark.parametrize(
    "starts", [[0], [0, 0], [0, 5], [0, 5, 5, 5, 20], [0, 0, 7], [0, 49], [0, 50], [0, 50, 50], list(range(50))]
)
@pytest.mark.parametrize("positions", [[0, 4, 5, 19, 49], [10]])
def test_segments_add_up_to_one_for_each_row(starts, positions):
    problem = build(50, positions)
    received, by_segment = check(problem, segment_starts=starts)
    torch.testing.assert_close(by_segment.sum(1), torch.ones(len(positions)), atol=1e-6, rtol=0)
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], 50], strict=True)):
        torch.testing.assert_close(by_segment[:, i].sum(), received[start:end].sum(), atol=1e-5, rtol=0)
        if start == end:
            assert (by_segment[:, i] == 0).all()


def test_a_small_segment_behind_a_large_one_is_not_lost():
    """A mass of 1e-9 behind masses of 1: a difference of fp32 sums would be 0 or 6e-8."""
    q, k = torch.ones(1, 1, 1), torch.zeros(100, 1, 1)
    k[99] = -20.7  # exp(-20.7) is 1e-9
    _, by_segment = attention_mass(q, k, torch.tensor([99]), sm_scale=1.0, segment_starts=[0, 99])
    _, expected = attention_mass_reference(q, k, torch.tensor([99]), sm_scale=1.0, segment_starts=[0, 99])
    torch.testing.assert_close(by_segment.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("skip_self", [False, True])
def test_received_adds_up_to_the_rows(skip_self):
    problem = build(60, [0, 7, 30, 31, 59])
    received, _ = check(problem, skip_self=skip_self)
    assert received.sum().item() == pytest.approx(5, abs=1e-5) if not skip_self else received.sum() < 4
    assert (received >= -1e-6).all()


@pytest.mark.parametrize("positions", [[0], [0, 0, 5], list(range(30)), [29, 3, 3]])
def test_skip_self_leaves_out_what_a_row_gives_to_its_own_key(positions):
    problem = build(30, positions)
    whole, by_segment = check(problem, segment_starts=[0, 9])
    without, same_by_segment = check(problem, segment_starts=[0, 9], skip_self=True)
    torch.testing.assert_close(by_segment, same_by_segment, atol=0, rtol=0)
    others = [i for i in range(30) if i not in positions]
    torch.testing.assert_close(without[others], whole[others], atol=0, rtol=0)
    assert (without[positions] < whole[positions]).all()


@pytest.mark.parametrize("block_elements", [1, 200, 450, 4 * 67 * 3, 1 << 22])
def test_rows_in_blocks_give_the_same(monkeypatch, block_elements):
    problem = build(67, [0, 1, 5, 31, 32, 33, 64, 66])
    whole, by_segment = attention_mass(*problem.inputs, sm_scale=0.25, segment_starts=[0, 10, 40])
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS_CPU", block_elements)
    received, blocked = check(problem, segment_starts=[0, 10, 40])
    torch.testing.assert_close(received, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(blocked, by_segment, atol=1e-6, rtol=1e-6)
    check(problem, skip_self=True, logit_cap=2.0)


def test_a_block_is_never_larger_than_its_bound(monkeypatch):
    sizes = []
    scores = module._scores

    def watched(q, keys, *args):
        sizes.append(q.shape[0] * q.shape[1] * keys.shape[2])
        return scores(q, keys, *args)

    monkeypatch.setattr(module, "_scores", watched)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS_CPU", 1000)
    check(build(50, list(range(50))))
    assert max(sizes) <= 1000
    assert 50 * 4 * 50 / 2 < sum(sizes) < 50 * 4 * 50  # keys behind the last row of a block are left out


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_behind_a_row_have_no_influence(poison, logit_cap, dtype):
    """Slots behind the last computed position hold whatever lay there; behind an earlier row, what it must not see."""
    positions = [3, 10, 20]
    problem = build(40, positions, dtype=dtype)
    options = {"sm_scale": 0.25, "logit_cap": logit_cap, "segment_starts": [0, 5, 15, 30]}
    for row, position in enumerate(positions):
        clean = problem.k.clone()
        clean[position + 1 :] = 0
        poisoned = clean.clone()
        poisoned[position + 1 :] = poison
        q, at = problem.q[row : row + 1], problem.row_positions[row : row + 1]
        received, by_segment = attention_mass(q, poisoned, at, **options)
        clean_received, clean_by_segment = attention_mass(q, clean, at, **options)
        torch.testing.assert_close(received, clean_received, atol=0, rtol=0)
        torch.testing.assert_close(by_segment, clean_by_segment, atol=0, rtol=0)
        assert (received[position + 1 :] == 0).all()


def test_a_row_does_not_depend_on_the_others():
    problem = build(67, [0, 1, 5, 31, 66])
    _, together = attention_mass(*problem.inputs, sm_scale=0.25, segment_starts=[0, 4, 30])
    for row in range(5):
        one = slice(row, row + 1)
        q, at = problem.q[one], problem.row_positions[one]
        _, alone = attention_mass(q, problem.k, at, sm_scale=0.25, segment_starts=[0, 4, 30])
        torch.testing.assert_close(alone, together[one], atol=1e-6, rtol=1e-6)


def test_large_scores_do_not_overflow():
    # Scores near 1,000 are known to 1e-4 in fp32: that is what the weights can be off by.
    check(build(67, [0, 31, 66]), sm_scale=40.0, tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_beyond_the_range_of_half_precision(dtype):
    """Before scaling, q.k of a model with large key biases exceeds 65,504; scaled scores are of ordinary size."""
    q = torch.full((1, 1, 128), 30.0, dtype=dtype)
    k = torch.full((3, 1, 128), 20.0, dtype=dtype)
    k[1] = 20.0625 if dtype == torch.float16 else 20.125
    problem = Problem(q, k, torch.tensor([2]))
    check(problem, sm_scale=1e-3, segment_starts=[0, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_keep_more_digits_than_the_dtype(dtype):
    """Scores of 64 and more that differ by less than a step of the dtype: the weights still do."""
    q = torch.ones(1, 1, 64, dtype=dtype)
    k = torch.full((2, 1, 64), 4.0, dtype=dtype)
    k[1, 0, 0] += 0.03125  # q.k is 256 and 256.03125
    problem = Problem(q, k, torch.tensor([1]))
    check(problem, sm_scale=8.0, tolerance=1e-3)


def test_keys_of_another_dtype():
    problem = build(33, [4, 32], dtype=torch.float32)
    k = problem.k.half()
    check(Problem(problem.q, k, problem.row_positions))
    check(Problem(problem.q.bfloat16(), problem.k, problem.row_positions))


def test_strided_q_and_k():
    """Cut out of wider tensors, as a fused projection and a KV pool give them."""
    problem = build(33, [4, 17, 32])
    wide_q, wide_k = torch.full((3, 7, 16), float("nan")), torch.full((33, 3, 16), float("nan"))
    wide_q[:, :4], wide_k[:, :2] = problem.q, problem.k
    check(Problem(wide_q[:, :4], wide_k[:, :2], problem.row_positions), segment_starts=[0, 9])


def test_no_rows():
    received, by_segment = attention_mass(*build(5, []).inputs, sm_scale=1.0, segment_starts=[0, 2])
    assert received.tolist() == [0.0] * 5
    assert by_segment.shape == (0, 2)


def test_inputs_are_not_written():
    problem = build(33, [4, 17, 32])
    before = [tensor.clone() for tensor in problem.inputs]
    check(problem, segment_starts=[0, 9], skip_self=True, logit_cap=3.0)
    for tensor, copy in zip(problem.inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("q, k: shapes", {"q": torch.zeros(2, 3, 16)}),
        ("q, k: shapes", {"q": torch.zeros(2, 4, 8)}),
        ("q, k: shapes", {"q": torch.zeros(2, 64)}),
        ("q, k: shapes", {"k": torch.zeros(10, 32)}),
        ("q, k: shapes", {"k": torch.zeros(10, 0, 16)}),
        ("row_positions: torch.int64 \\(3,\\), need int64 \\(2,\\)", {"row_positions": torch.tensor([1, 2, 3])}),
        ("row_positions: torch.int32", {"row_positions": torch.tensor([1, 2], dtype=torch.int32)}),
        ("row_positions", {"row_positions": torch.tensor([[1, 2]])}),
        ("segment_starts: \\[\\]", {"segment_starts": []}),
        ("segment_starts: \\[1\\]", {"segment_starts": [1]}),
        ("segment_starts", {"segment_starts": [0, 5, 4]}),
        ("segment_starts", {"segment_starts": [0, 11]}),
        ("segment_starts", {"segment_starts": [0, -1]}),
        ("sinks: shape \\(2,\\)", {"sinks": torch.zeros(2)}),
    ],
)
def test_bad_arguments_are_named(field, change):
    args = {
        "q": torch.zeros(2, 4, 16),
        "k": torch.zeros(10, 2, 16),
        "row_positions": torch.tensor([4, 9]),
        "sm_scale": 0.25,
    }
    with pytest.raises(ValueError, match=field):
        attention_mass(**(args | change))
