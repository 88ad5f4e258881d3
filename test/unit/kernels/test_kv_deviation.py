"""kv_deviation against its float64 definition."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.kv_deviation import kv_deviation
from sgl_kernel_ext.kv_deviation.naive import kv_deviation_reference
from sgl_kernel_ext.rotary import default_inv_freq


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


def test_v_alone():
    k_new, v_new, k_old, v_old = build()
    nothing = torch.full_like(k_new, float("nan"))
    found = kv_deviation(nothing, v_new, nothing, v_old, only_v=True)
    torch.testing.assert_close(found, kv_deviation(k_old, v_new, k_old, v_old), atol=0, rtol=0)


def test_no_tokens():
    assert check(*build(num_tokens=0)).shape == (0,)


def test_inputs_are_not_written():
    tensors = build()
    before = [tensor.clone() for tensor in tensors]
    check(*tensors)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, atol=0, rtol=0)


SPECS = [RotarySpec(dim, is_neox, default_inv_freq(1e4, dim)) for dim in (16, 8, 2) for is_neox in (True, False)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.rotary_dim}-{spec.is_neox}")
def test_the_old_k_is_found_in_its_slot_and_turned(spec):
    k_new, v_new, k_old, v_old = build()
    slots = torch.tensor([40, 3, 3, 7, 0, 41, 12, 9, 30])
    k_pool, v_pool = torch.full((42, 2, 16), float("nan")), torch.full((42, 2, 16), float("nan"))
    k_pool[slots], v_pool[slots] = k_old, v_old
    given = {"slots": slots, "position_delta": torch.tensor([0, 1, -1, 70_000, -9, 0, 3, 5, 100]), "spec": spec}
    expected = kv_deviation_reference(k_new, v_new, k_pool, v_pool, **given)
    found = kv_deviation(k_new, v_new, k_pool, v_pool, **given)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=2e-5)


def test_a_copy_that_was_turned_does_not_deviate():
    """What copy_rotate has moved is what the shift of the old K says."""
    spec = SPECS[0]
    k, v, _, _ = build()
    slots, there = torch.arange(9), torch.arange(9, 18)
    k_pool, v_pool = torch.cat([k, torch.zeros_like(k)]), torch.cat([v, torch.zeros_like(v)])
    delta = torch.full((9,), 123)
    copy_rotate([k_pool], [v_pool], slots, there, delta, spec)
    found = kv_deviation(k_pool[there], v_pool[there], k_pool, v_pool, slots=slots, position_delta=delta, spec=spec)
    assert found.max() < 1e-10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": torch.arange(8)}, r"slots: torch.int64 \(8,\), need int64 \(9,\)"),
        ({"slots": torch.arange(9).int()}, "slots: torch.int32"),
        ({"position_delta": torch.arange(9)}, "position_delta, spec: give both"),
        ({"spec": SPECS[0]}, "position_delta, spec: give both"),
        ({"position_delta": torch.arange(3), "spec": SPECS[0]}, "position_delta: torch.int64"),
        (
            {"position_delta": torch.arange(9), "spec": RotarySpec(32, True, default_inv_freq(1e4, 32))},
            "spec: 32 rotary dimensions, but heads have 16",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        kv_deviation(*build(), **given)


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
