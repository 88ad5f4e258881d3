"""kv_deviation against its float64 definition."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference


def build(num_tokens=9, num_kv_heads=2, head_dim=16, v_head_dim=None, dtype=torch.float32, scale=1.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, num_kv_heads, head_dim), (num_tokens, num_kv_heads, v_head_dim or head_dim)] * 2
    return [(scale * torch.randn(*shape, generator=rng)).to(dtype) for shape in shapes]


def check(k_new, v_new, k_old, v_old):
    deviation = kv_deviation(k_new, v_new, k_old, v_old)
    expected = kv_deviation_reference(k_new, v_new, k_old, v_old)
    assert (deviation.dtype, deviation.shape) == (torch.float32, (len(k_new),))
    # Differences of half-precision numbers are exact in fp32, so the tolerance is that of fp32 sums whatever the dtype.
    torch.testing.assert_close(deviation.double(), expected, atol=0, rtol=1e-5)
    return deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim", "v_head_dim"),
    [(1, 1, 1, 1), (1, 2, 16, 16), (9, 2, 16, 16), (300, 1, 128, 128), (5, 8, 80, 80), (7, 2, 24, 40)],
)
def test_equals_the_definition(num_tokens, num_kv_heads, head_dim, v_head_dim, dtype):
    check(*build(num_tokens, num_kv_heads, head_dim, v_head_dim, dtype))


def test_by_hand():
    k_new, v_new = torch.zeros(2, 2, 2), torch.zeros(2, 2, 1)
    k_old, v_old = k_new.clone(), v_new.clone()
    k_old[0, 1] = torch.tensor([3.0, 4.0])
    v_old[0, 0], v_old[1, 1] = 2.0, -1.0
    assert check(k_new, v_new, k_old, v_old).tolist() == [29.0, 1.0]


def test_what_did_not_change_deviates_by_zero():
    k, v, _, _ = build()
    assert check(k, v, k.clone(), v.clone()).tolist() == [0.0] * 9


def test_a_small_change_of_large_values_is_seen():
    k, v, _, _ = build(scale=1000.0)
    changed = k.clone()
    changed[4, 1, 3] += 0.25
    deviation = check(changed, v, k, v)
    assert deviation.argmax() == 4
    assert deviation[4].item() == pytest.approx(0.0625, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_do_not_overflow_in_half_precision(dtype):
    assert check(*build(dtype=dtype, scale=2000.0)).isfinite().all()


def test_new_and_old_of_different_dtypes():
    k_new, v_new, k_old, v_old = build()
    check(k_new, v_new, k_old.bfloat16(), v_old.half())


def test_nan_stays_in_its_token():
    """Of rows that are computed anew the old K and V are undefined."""
    k_new, v_new, k_old, v_old = build()
    clean = kv_deviation(k_new, v_new, k_old, v_old)
    k_old[3] = float("nan")
    found = kv_deviation(k_new, v_new, k_old, v_old)
    others = [i for i in range(9) if i != 3]
    assert found[3].isnan()
    torch.testing.assert_close(found[others], clean[others], atol=0, rtol=0)


def test_strided_inputs():
    """Cut out of wider tensors, as a fused projection gives them."""
    wide = [torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    check(*[tensor[:, :2] for tensor in wide])


def test_heads_of_two_ranks_add_up():
    tensors = build(num_kv_heads=4)
    parts = [kv_deviation(*[t[:, heads] for t in tensors]) for heads in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(parts[0] + parts[1], kv_deviation(*tensors), rtol=1e-6, atol=0)


def test_no_tokens():
    assert check(*build(num_tokens=0)).shape == (0,)


def test_inputs_are_not_written():
    tensors = build()
    before = [tensor.clone() for tensor in tensors]
    check(*tensors)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, atol=0, rtol=0)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("shape", [(8, 2, 16), (9, 1, 16), (9, 2, 8), (9, 32)])
def test_shapes_that_do_not_fit_are_named(place, shape):
    tensors = build()
    tensors[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^k_new \(.*need the same shape of new and old, and as many tokens"):
        kv_deviation(*tensors)


def test_as_many_tokens_of_k_as_of_v():
    k_new, v_new, k_old, v_old = build()
    with pytest.raises(ValueError, match="as many tokens of K as of V"):
        kv_deviation(k_new, v_new[:8], k_old, v_old[:8])
