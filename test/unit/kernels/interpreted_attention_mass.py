"""attention_mass in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sgl_kernel_ext.backend import FP8

# (kv_len, row positions): one key; one row; first and last position; scattered; all; unordered and repeated.
HARD = [
    (1, [0]),
    (33, [32]),
    (67, [0, 1, 5, 31, 32, 33, 64, 66]),
    (129, [3, *range(60, 101)]),
    (50, [49, 3, 3, 20]),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def build(kv_len, positions, *, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32):
    """Keys that no row sees hold NaN."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(len(positions), num_q_heads, head_dim, generator=rng).to(dtype)
    k = torch.randn(kv_len, num_kv_heads, head_dim, generator=rng).to(dtype)
    k[max(positions) + 1 :] = float("nan")
    return q, k, torch.tensor(positions, dtype=torch.int64)


def check(problem, *, sm_scale=0.25, tolerance=1e-5, **given):
    received, by_segment = attention_mass(*problem, sm_scale=sm_scale, backend="triton", **given)
    expected, expected_by_segment = attention_mass_reference(*problem, sm_scale=sm_scale, **given)
    assert received.dtype == torch.float32
    torch.testing.assert_close(received.double(), expected, atol=tolerance, rtol=tolerance)
    assert (by_segment is None) == (expected_by_segment is None)
    if by_segment is not None:
        torch.testing.assert_close(by_segment.double(), expected_by_segment, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_len", "positions"), HARD)
def test_hard_rows(kv_len, positions, dtype, logit_cap):
    check(build(kv_len, positions, dtype=dtype), logit_cap=logit_cap, segment_starts=[0, kv_len // 3, kv_len // 2])


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_grouped_query_heads(num_q_heads, num_kv_heads):
    check(build(45, [3, 17, 18, 44], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads), segment_starts=[0, 20])


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_head_dims(head_dim):
    check(build(50, [0, 13, 49], head_dim=head_dim), sm_scale=head_dim**-0.5)


@pytest.mark.parametrize("starts", [[0, 0], [0, 5, 5, 5, 20], [0, 0, 7], [0, 49], [0, 50, 50], list(range(50))])
@pytest.mark.parametrize("positions", [[0, 4, 5, 19, 49], [10]])
def test_segments(starts, positions):
    check(build(50, positions), segment_starts=starts)


@pytest.mark.parametrize("starts", [None, [0, 3, 3, 260, 1100, 1356], [0, 1400]])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, *FP8])
def test_segments_of_several_pieces(starts, kv_dtype):
    """Pieces have 256 keys here; the first row sees one piece, none sees all of the last."""
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    q, k, rows = build(1400, [100, 256, 511, 512, 1398], num_q_heads=2, num_kv_heads=1, dtype=dtype)
    check((q, k.to(kv_dtype), rows), segment_starts=starts)


@pytest.mark.parametrize("starts", [None, [0, 0, 7, 40]])
def test_sinks(starts):
    """They are of no segment."""
    sinks = torch.tensor([-3.0, 0.5, 2.0, 4.0]).bfloat16()
    check(build(67, [0, 1, 5, 31, 66]), segment_starts=starts, sinks=sinks, skip_self=True)


def test_a_question():
    """A quarter of an 8B model's heads, and chunks of uneven lengths."""
    q, k, rows = build(1100, list(range(1068, 1100)), num_q_heads=8, num_kv_heads=2, head_dim=128)
    check((q.bfloat16(), k.bfloat16(), rows), sm_scale=128**-0.5, segment_starts=[0, 20, 700, 705, 1050])


@pytest.mark.parametrize("positions", [[0], [0, 0, 5], list(range(30)), [29, 3, 3]])
def test_skip_self(positions):
    check(build(30, positions), segment_starts=[0, 9], skip_self=True)


def test_a_small_segment_behind_a_large_one_is_not_lost():
    q, k = torch.ones(1, 1, 1), torch.zeros(100, 1, 1)
    k[99] = -20.7  # exp(-20.7) is 1e-9
    _, by_segment = attention_mass(q, k, torch.tensor([99]), sm_scale=1.0, segment_starts=[0, 99], backend="triton")
    _, expected = attention_mass_reference(q, k, torch.tensor([99]), sm_scale=1.0, segment_starts=[0, 99])
    torch.testing.assert_close(by_segment.double(), expected, rtol=1e-5, atol=0)


def test_large_scores_do_not_overflow():
    # Scores near 1,000 are known to 1e-4 in fp32: that is what the weights can be off by.
    check(build(67, [0, 31, 66]), sm_scale=40.0, tolerance=1e-3)


def test_strided_q_and_keys():
    q, k, positions = build(40, [3, 10, 39])
    wide_q, wide_k = torch.full((3, 9, 16), float("nan")), torch.full((40, 5, 16), float("nan"))
    wide_q[:, :4], wide_k[:, :2] = q, k
    check((wide_q[:, :4], wide_k[:, :2], positions), segment_starts=[0, 7])


def test_a_last_dimension_that_is_not_dense_is_refused():
    q, k, positions = build(9, [4])
    with pytest.raises(ValueError, match="q: stride"):
        attention_mass(q.transpose(1, 2).contiguous().transpose(1, 2), k, positions, sm_scale=1.0, backend="triton")
