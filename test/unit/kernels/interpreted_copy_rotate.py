"""copy_rotate in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1).

The interpreter shows what is computed and where it is written. It can't show the conversion of fp8 that GPUs from sm_89
on do by themselves (here integer arithmetic does it, as on older GPUs), nor rounding to bf16, which it truncates.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from sgl_kernel_ext import RotarySpec, copy_rotate, rotary, triton_parts
from sgl_kernel_ext.copy_rotate import triton as kernels
from sgl_kernel_ext.rotary import default_inv_freq

sys.path.insert(0, str(Path(__file__).parent))  # the folder is not a package
from test_copy_rotate import (
    DTYPES,
    FP8,
    LAYOUTS,
    check,
    check_every_byte,
    check_infinity,
    check_pool_of_bytes,
    check_saturation_and_nan,
    scattered,
    some_deltas,
)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "rotary_dim", "num_heads"),
    [((64, 64), 64, 3), ((80, 80), 32, 8), ((96, 128), 96, 1), ((20, 12), 6, 12), ((256, 256), 256, 2)],
)
def test_shapes(dtype, dims, rotary_dim, num_heads, is_neox):
    shape = {"dims": dims, "rotary_dim": rotary_dim, "num_heads": num_heads, "is_neox": is_neox}
    check(*scattered(11), some_deltas(11), dtype=dtype, **shape, backend="triton")


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_token_counts(num_tokens):
    check(*scattered(num_tokens), torch.full((num_tokens,), -70_001), backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, *FP8])
def test_layers_of_different_layouts(dtype):
    check(*scattered(19), some_deltas(19), layouts=[*LAYOUTS, "dense"], dtype=dtype, backend="triton")


def test_one_launch_for_equal_layers(monkeypatch):
    launches = []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args: (launches.append(len(args[1].on_device)), launch(*args)))
    check(*scattered(9), some_deltas(9), layouts=["dense"] * 5, backend="triton")
    assert launches == [5]
    launches.clear()
    monkeypatch.setattr(rotary, "_TABLE_LEN", 8)
    check(*scattered(20), some_deltas(20), layouts=["dense", "padded", "dense"], backend="triton")
    assert launches == [2, 1]


def test_a_turn_is_computed_once_for_all_layers(monkeypatch):
    made = []
    table = rotary.rotation_table
    monkeypatch.setattr(rotary, "rotation_table", lambda *args: (made.append(args), table(*args))[1])
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    turn = rotary.Turn(torch.tensor([7]))
    for _ in range(3):
        k, v = torch.ones(4, 1, 8), torch.ones(4, 1, 8)
        copy_rotate([k], [v], torch.tensor([0]), torch.tensor([1]), turn, spec, backend="triton")
    assert len(made) == 1


def test_addresses_are_made_once():
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    pools = [[torch.ones(4, 1, 8) for _ in range(3)] for _ in "kv"]
    triton_parts._constants.cache_clear()
    for delta in (3, 4):
        copy_rotate(*pools, torch.tensor([0]), torch.tensor([1]), torch.tensor([delta]), spec, backend="triton")
    assert triton_parts._constants.cache_info()[:2] == (2, 2)  # K and V, twice


def test_nothing_to_copy():
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    none = torch.zeros(0, dtype=torch.int64)
    k = torch.ones(4, 1, 8)
    copy_rotate([k], [k.clone()], none, none, none, spec, backend="triton")
    assert (k == 1).all()


def test_delta_zero_keeps_every_bit():
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    k = torch.zeros(4, 1, 8)
    k[0] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-42, 1.0, -0.0, 5.0, float("-inf")])
    v = k.clone()
    copy_rotate([k], [v], torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), spec, backend="triton")
    assert torch.equal(k[3].view(torch.int32), k[0].view(torch.int32))
    assert torch.equal(v[3].view(torch.int32), v[0].view(torch.int32))


@pytest.mark.parametrize("name", ["k_buffers", "v_buffers"])
def test_a_last_dimension_that_is_not_dense_is_refused(name):
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    pools = {pool: [torch.ones(4, 2, 8) for _ in range(2)] for pool in ("k_buffers", "v_buffers")}
    pools[name][1] = torch.ones(4, 8, 2).transpose(1, 2)
    slot = torch.tensor([0])
    with pytest.raises(ValueError, match=rf"{name}\[1\]: stride 2"):
        copy_rotate(**pools, src_loc=slot, dst_loc=slot + 1, position_delta=slot, spec=spec, backend="triton")


# --- fp8 --------------------------------------------------------------------------------------------------------------


def test_fp8():
    check_pool_of_bytes("triton")
    check_saturation_and_nan("triton", 5)
    check_infinity("triton")
    for dtype in FP8:
        check_every_byte("triton", 3, dtype)


@triton.jit
def _widen(raw_ptr, out_ptr, MANTISSA: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, kernels.fp32_of_fp8(tl.load(raw_ptr + at), MANTISSA, False))


@triton.jit
def _narrow(x_ptr, out_ptr, num_values, MANTISSA: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    code = kernels.fp8_of_fp32(tl.load(x_ptr + at, mask=at < num_values), MANTISSA, False)
    tl.store(out_ptr + at, code, mask=at < num_values)


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_conversion_is_that_of_torch(dtype, mantissa):
    """All 256 codes; to fp8: every number, every tie and its neighbours, and fp32 of any bits."""
    codes = torch.arange(256).to(torch.uint8)
    numbers, found = codes.view(dtype).float(), torch.empty(256)
    _widen[(1,)](codes, found, MANTISSA=mantissa)
    assert torch.equal(found.isnan(), numbers.isnan())
    kept = ~numbers.isnan()
    assert torch.equal(found[kept].view(torch.int32), numbers[kept].view(torch.int32))

    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-1e9, 1e9)]
    rng = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (50_000,), generator=rng).to(torch.int32).view(torch.float32)
    x = torch.cat((numbers, ties, *beside, torch.randn(20_000, generator=rng) / 64, any_bits))
    found = torch.empty(len(x), dtype=torch.uint8)
    _narrow[(triton.cdiv(len(x), 4096),)](x, found, len(x), MANTISSA=mantissa)
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(found.view(dtype).float().isnan(), x.isnan())
    kept = ~x.isnan()
    assert torch.equal(found[kept], expected[kept].view(torch.uint8))
