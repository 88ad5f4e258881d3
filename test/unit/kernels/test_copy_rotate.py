"""copy_rotate in torch against its float64 definition."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.rotary import default_inv_freq

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make_pools(num_slots, src, *, dims, dtype, num_heads=3, num_layers=2):
    """Layers of [num_slots, num_heads, dim] for each dim; all but the source slots are NaN."""
    rng = torch.Generator().manual_seed(num_slots)
    pools = []
    for dim in dims:
        layers = [torch.full((num_slots, num_heads, dim), float("nan"), dtype=dtype) for _ in range(num_layers)]
        for layer in layers:
            layer[src] = torch.randn(len(src), num_heads, dim, generator=rng).to(dtype)
        pools.append(layers)
    return pools


def check(src, dst, delta, *, dtype=torch.float32, dims=(16, 16), rotary_dim=16, is_neox=True):
    """Destinations are the reference's; every other slot, the NaN ones included, keeps its value."""
    num_slots = int(max(src.max(), dst.max())) + 3
    pools = make_pools(num_slots, src, dims=dims, dtype=dtype)
    expected = [[layer.clone() for layer in layers] for layers in pools]
    spec = RotarySpec(rotary_dim, is_neox, default_inv_freq(10_000.0, rotary_dim))
    copy_rotate(*pools, src, dst, delta, spec, backend="torch")
    copy_rotate_reference(*expected, src, dst, delta, spec)
    for k, v, expected_k, expected_v in zip(*pools, *expected, strict=True):
        torch.testing.assert_close(k, expected_k, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
        torch.testing.assert_close(v, expected_v, atol=0, rtol=0, equal_nan=True)
        others = torch.ones(num_slots, dtype=torch.bool)
        others[dst] = False
        torch.testing.assert_close(k[others], expected_k[others], atol=0, rtol=0, equal_nan=True)
        still = delta == 0
        torch.testing.assert_close(k[dst[still]], k[src[still]], atol=0, rtol=0)


def scattered(num_tokens, seed=0):
    order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens], order[num_tokens:]


def some_deltas(num_tokens):
    delta = torch.randint(-100_000, 100_000, (num_tokens,), generator=torch.Generator().manual_seed(1))
    delta[::3] = 0
    return delta


SHAPES = [((64, 64), 64), ((80, 80), 32), ((96, 128), 96), ((20, 12), 6)]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("dims", "rotary_dim"), SHAPES)
def test_scattered_slots(dims, rotary_dim, dtype, is_neox):
    check(*scattered(70), some_deltas(70), dims=dims, rotary_dim=rotary_dim, dtype=dtype, is_neox=is_neox)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("dims", "rotary_dim"), SHAPES)
def test_long_runs(dims, rotary_dim, dtype, is_neox):
    """Three chunks in consecutive slots, the middle one unmoved, and a few loose tokens between."""
    src = torch.cat((torch.arange(0, 600), torch.tensor([700, 705]), torch.arange(800, 850), torch.arange(900, 1000)))
    dst = torch.cat((torch.arange(2000, 2600), torch.tensor([1900, 1800]), torch.arange(1500, 1650)))
    delta = torch.cat((torch.full((600,), -37), torch.tensor([5, 0]), torch.zeros(50), torch.full((100,), 9000)))
    check(src, dst, delta.long(), dims=dims, rotary_dim=rotary_dim, dtype=dtype, is_neox=is_neox)


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 511, 512, 513, 1100])
@pytest.mark.parametrize("is_run", [True, False])
def test_token_counts(num_tokens, is_run):
    src, dst = scattered(num_tokens)
    if is_run:
        src, dst = torch.arange(num_tokens), torch.arange(num_tokens) + num_tokens
    check(src, dst, torch.full((num_tokens,), 123))
    check(src, dst, torch.zeros(num_tokens, dtype=torch.int64))


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_delta_zero_keeps_every_bit(num_tokens):
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    k = torch.zeros(2 * num_tokens, 1, 8)
    k[:num_tokens] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-42, 1.0, -0.0, 5.0, float("-inf")])
    v = k.clone()
    src = torch.arange(num_tokens)
    copy_rotate([k], [v], src, src + num_tokens, torch.zeros(num_tokens, dtype=torch.int64), spec)
    for buffer in (k, v):
        assert torch.equal(buffer[num_tokens:].view(torch.int32), buffer[:num_tokens].view(torch.int32))


def test_there_and_back():
    """Moving by a million positions and back returns the key: the angles are exact enough at that distance."""
    spec = RotarySpec(64, False, default_inv_freq(10_000.0, 64))
    k = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    first = k[0].clone()
    v = torch.zeros(3, 2, 64)
    copy_rotate([k], [v], torch.tensor([0]), torch.tensor([1]), torch.tensor([1_000_003]), spec)
    assert (k[1] - first).abs().max() > 0.1
    copy_rotate([k], [v], torch.tensor([1]), torch.tensor([2]), torch.tensor([-1_000_003]), spec)
    torch.testing.assert_close(k[2], first, atol=1e-6, rtol=1e-6)


def test_nothing_to_copy():
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    none = torch.zeros(0, dtype=torch.int64)
    k = torch.ones(4, 1, 8)
    copy_rotate([k], [k.clone()], none, none, none, spec)
    copy_rotate([], [], torch.tensor([0]), torch.tensor([1]), torch.tensor([1]), spec)
    assert (k == 1).all()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("v_buffers: 0 layers", {"v_buffers": []}),
        ("dst_loc", {"dst_loc": torch.tensor([1, 2])}),
        ("src_loc", {"src_loc": torch.tensor([0], dtype=torch.int32)}),
        ("position_delta", {"position_delta": torch.tensor([1.0])}),
        (r"k_buffers\[0\]", {"k_buffers": [torch.zeros(4, 8)]}),
        (r"k_buffers\[0\]: head_dim 4", {"k_buffers": [torch.zeros(4, 1, 4)]}),
        (r"k_buffers\[0\]", {"k_buffers": [torch.zeros(4, 1, 8, dtype=torch.float64)]}),
        ("backend", {"backend": "metal"}),
    ],
)
def test_bad_arguments_are_named(field, change):
    args = {
        "k_buffers": [torch.zeros(4, 1, 8)],
        "v_buffers": [torch.zeros(4, 1, 8)],
        "src_loc": torch.tensor([0]),
        "dst_loc": torch.tensor([1]),
        "position_delta": torch.tensor([1]),
        "spec": RotarySpec(8, True, default_inv_freq(10_000.0, 8)),
    }
    with pytest.raises(ValueError, match=field):
        copy_rotate(**(args | change))
