"""copy_rotate in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.rotary import default_inv_freq

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(num_tokens, dtype, *, head_dim, v_head_dim, rotary_dim, is_neox, num_layers=2):
    rng = torch.Generator().manual_seed(num_tokens)
    num_slots = 2 * num_tokens + 5
    order = torch.randperm(num_slots, generator=rng)
    src, dst = order[:num_tokens], order[num_tokens : 2 * num_tokens]
    delta = torch.randint(-100_000, 100_000, (num_tokens,), generator=rng)
    delta[::3] = 0
    spec = RotarySpec(rotary_dim, is_neox, default_inv_freq(10_000.0, rotary_dim))
    pools = []
    for dim in (head_dim, v_head_dim):
        layers = [torch.full((num_slots, 3, dim), float("nan"), dtype=dtype) for _ in range(num_layers)]
        for layer in layers:
            layer[src] = torch.randn(num_tokens, 3, dim, generator=rng).to(dtype)
        pools.append(layers)
    expected = [[layer.clone() for layer in layers] for layers in pools]
    copy_rotate(*pools, src, dst, delta, spec, backend="triton")
    copy_rotate_reference(*expected, src, dst, delta, spec)
    tolerance = TOLERANCE[dtype]
    for layer in range(num_layers):
        torch.testing.assert_close(pools[0][layer], expected[0][layer], atol=tolerance, rtol=tolerance, equal_nan=True)
        torch.testing.assert_close(pools[1][layer], expected[1][layer], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "rotary_dim"), [(64, 64, 64), (80, 80, 32), (96, 128, 96), (20, 12, 6)]
)
def test_shapes(dtype, head_dim, v_head_dim, rotary_dim, is_neox):
    check(11, dtype, head_dim=head_dim, v_head_dim=v_head_dim, rotary_dim=rotary_dim, is_neox=is_neox)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9])
def test_token_counts(num_tokens):
    check(num_tokens, torch.float32, head_dim=16, v_head_dim=16, rotary_dim=16, is_neox=True)


def test_delta_zero_keeps_every_bit():
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    k = torch.zeros(4, 1, 8)
    k[0] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-42, 1.0, -0.0, 5.0, float("-inf")])
    v = k.clone()
    copy_rotate([k], [v], torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), spec, backend="triton")
    assert torch.equal(k[3].view(torch.int32), k[0].view(torch.int32))
    assert torch.equal(v[3].view(torch.int32), v[0].view(torch.int32))
