"""kv_deviation in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference
from sgl_kernel_ext.rotary import RotarySpec, default_inv_freq

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def build(num_tokens=9, num_kv_heads=2, head_dim=16, v_head_dim=None, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, num_kv_heads, head_dim), (num_tokens, num_kv_heads, v_head_dim or head_dim)] * 2
    return [torch.randn(*shape, generator=rng).to(dtype) for shape in shapes]


def check(*tensors, **given):
    found = kv_deviation(*tensors, **given, backend="triton")
    expected = kv_deviation_reference(*tensors, **given)
    assert (found.dtype, found.shape) == (torch.float32, expected.shape)
    torch.testing.assert_close(found.double(), expected, atol=1e-9, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim", "v_head_dim"),
    [(1, 1, 1, 1), (1, 2, 16, 16), (9, 2, 16, 16), (30, 1, 128, 128), (5, 8, 80, 80), (7, 3, 24, 40)],
)
def test_equals_the_definition(num_tokens, num_kv_heads, head_dim, v_head_dim, dtype):
    check(*build(num_tokens, num_kv_heads, head_dim, v_head_dim, dtype))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 12, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_and_shift(rotary_dim, is_neox, dtype):
    k_new, v_new, k_old, v_old = build(dtype=dtype)
    slots = torch.tensor([40, 3, 3, 7, 0, 41, 12, 9, 30])
    k_pool, v_pool = (torch.full((42, 2, 16), float("nan"), dtype=dtype) for _ in range(2))
    k_pool[slots], v_pool[slots] = k_old, v_old
    spec = RotarySpec(rotary_dim, is_neox, default_inv_freq(1e4, rotary_dim))
    delta = torch.tensor([0, 1, -1, 70_000, -9, 0, 3, 5, 100])
    check(k_new, v_new, k_pool, v_pool, slots=slots, position_delta=delta, spec=spec)


def test_v_alone():
    k_new, v_new, k_old, v_old = build()
    nothing = torch.full_like(k_new, float("nan"))
    spec, delta = RotarySpec(16, True, default_inv_freq(1e4, 16)), torch.arange(9)
    found = kv_deviation(nothing, v_new, nothing, v_old, position_delta=delta, spec=spec, only_v=True, backend="triton")
    expected = kv_deviation_reference(k_old, v_new, k_old, v_old)
    torch.testing.assert_close(found.double(), expected, atol=1e-9, rtol=2e-5)


def test_strided_inputs():
    check(*[torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(i))[:, :2] for i in range(4)])


def test_nan_stays_in_its_token():
    k_new, v_new, k_old, v_old = build()
    clean = kv_deviation(k_new, v_new, k_old, v_old, backend="triton")
    k_old[3] = float("nan")
    found = kv_deviation(k_new, v_new, k_old, v_old, backend="triton")
    others = [i for i in range(9) if i != 3]
    assert found[3].isnan()
    torch.testing.assert_close(found[others], clean[others], atol=0, rtol=0)


def test_no_tokens():
    check(*build(num_tokens=0))


def test_a_last_dimension_that_is_not_dense_is_refused():
    k_new, v_new, k_old, v_old = build()
    with pytest.raises(ValueError, match="k_new: stride"):
        kv_deviation(k_new.transpose(1, 2).contiguous().transpose(1, 2), v_new, k_old, v_old, backend="triton")
