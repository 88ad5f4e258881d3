"""copy_rotate in torch against its float64 definition. `interpreted_copy_rotate.py` runs the checks with Triton."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sgl_kernel_ext import RotarySpec, copy_rotate
from sgl_kernel_ext.copy_rotate import naive
from sgl_kernel_ext.copy_rotate.naive import copy_rotate_reference
from sgl_kernel_ext.rotary import default_inv_freq

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*TOLERANCE, *FP8]
LAYOUTS = ["dense", "padded", "heads first", "odd start"]


def make_layer(num_slots, num_heads, dim, dtype, layout, src, rng):
    """[num_slots, num_heads, dim], NaN in all but the source slots and in the gaps between heads and slots."""
    shapes = {"padded": (num_slots, num_heads + 1, dim + 3), "heads first": (num_heads, num_slots, dim)}
    shape = shapes.get(layout, (num_slots, num_heads, dim))
    gap = 1 if layout == "odd start" else 0  # elements before the first: no address is a multiple of 16
    flat = torch.full((gap + shape[0] * shape[1] * shape[2],), float("nan")).to(dtype)
    layer = flat[gap:].view(shape)
    layer = layer.transpose(0, 1) if layout == "heads first" else layer[:, :num_heads, :dim]
    raw(layer)[src] = raw(torch.randn(len(src), num_heads, dim, generator=rng).to(dtype))
    return layer


def make_pools(num_slots, src, *, dims, dtype, num_heads, layouts):
    """Layers of K and layers of V, one for each layout; the same at each call."""
    rng = torch.Generator().manual_seed(num_slots)
    return [[make_layer(num_slots, num_heads, dim, dtype, name, src, rng) for name in layouts] for dim in dims]


def raw(tensor):
    return tensor.view(torch.uint8) if tensor.dtype in FP8 else tensor


def storage(tensor):
    """Every byte of the memory, gaps included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def steps(tensor):
    """fp8 numbers counted from 0 upwards: neighbours differ by 1."""
    bits = tensor.view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)


def assert_rotated(found, expected):
    if found.dtype not in FP8:
        tolerance = TOLERANCE[found.dtype]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        return
    assert not found.float().isnan().any()
    # fp32 and float64 may fall on different sides of a tie, hardly ever.
    off = (steps(found) - steps(expected)).abs()
    assert off.max() <= 1
    assert (off > 0).sum() <= 1 + off.numel() // 1000


def check(
    src,
    dst,
    delta,
    *,
    dtype=torch.float32,
    dims=(16, 16),
    rotary_dim=16,
    is_neox=True,
    num_heads=3,
    layouts=("dense",) * 2,
    backend="torch",
):
    """Destinations are the reference's; every other byte keeps its value, those of NaN included."""
    num_slots = int(max(src.max(), dst.max())) + 3
    pools, expected = (
        make_pools(num_slots, src, dims=dims, dtype=dtype, num_heads=num_heads, layouts=layouts) for _ in range(2)
    )
    spec = RotarySpec(rotary_dim, is_neox, default_inv_freq(10_000.0, rotary_dim))
    copy_rotate(*pools, src, dst, delta, spec, backend=backend)
    copy_rotate_reference(*expected, src, dst, delta, spec)
    still = delta == 0
    for k, v, expected_k, expected_v in zip(*pools, *expected, strict=True):
        assert torch.equal(storage(v), storage(expected_v))
        new, old = raw(k)[dst], raw(k)[src]
        assert torch.equal(new[still], old[still])
        assert torch.equal(new[..., rotary_dim:], old[..., rotary_dim:])
        assert_rotated(new.view(dtype), raw(expected_k)[dst].view(dtype))
        raw(k)[dst] = raw(expected_k)[dst]
        assert torch.equal(storage(k), storage(expected_k))


def scattered(num_tokens, seed=0):
    order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens], order[num_tokens:]


def some_deltas(num_tokens):
    delta = torch.randint(-100_000, 100_000, (num_tokens,), generator=torch.Generator().manual_seed(1))
    delta[::3] = 0
    return delta


SHAPES = [((64, 64), 64), ((80, 80), 32), ((96, 128), 96), ((20, 12), 6)]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "rotary_dim"), SHAPES)
def test_scattered_slots(dims, rotary_dim, dtype, is_neox):
    check(*scattered(70), some_deltas(70), dims=dims, rotary_dim=rotary_dim, dtype=dtype, is_neox=is_neox)


@pytest.fixture(params=["by index", "by slices"])
def min_run(request, monkeypatch):
    """Runs of these small heads are copied by index, or, as those of large ones, by slices."""
    if request.param == "by slices":
        monkeypatch.setattr(naive, "_MIN_RUN_BYTES", 2048)


@pytest.mark.usefixtures("min_run")
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "rotary_dim"), SHAPES)
def test_long_runs(dims, rotary_dim, dtype, is_neox):
    """Three chunks in consecutive slots, the middle one unmoved, and a few loose tokens between."""
    src = torch.cat((torch.arange(0, 600), torch.tensor([700, 705]), torch.arange(800, 850), torch.arange(900, 1000)))
    dst = torch.cat((torch.arange(2000, 2600), torch.tensor([1900, 1800]), torch.arange(1500, 1650)))
    delta = torch.cat((torch.full((600,), -37), torch.tensor([5, 0]), torch.zeros(50), torch.full((100,), 9000)))
    check(src, dst, delta.long(), dims=dims, rotary_dim=rotary_dim, dtype=dtype, is_neox=is_neox)


@pytest.mark.usefixtures("min_run")
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 511, 512, 513, 1100])
@pytest.mark.parametrize("is_run", [True, False])
def test_token_counts(num_tokens, is_run):
    src, dst = scattered(num_tokens)
    if is_run:
        src, dst = torch.arange(num_tokens), torch.arange(num_tokens) + num_tokens
    check(src, dst, torch.full((num_tokens,), 123))
    check(src, dst, torch.zeros(num_tokens, dtype=torch.int64))


@pytest.mark.usefixtures("min_run")
@pytest.mark.parametrize("dtype", [torch.float32, *FP8])
def test_layers_of_different_layouts(dtype):
    check(*scattered(70), some_deltas(70), layouts=LAYOUTS, dtype=dtype)
    check(torch.arange(70), torch.arange(100, 170), torch.full((70,), 70_000), layouts=LAYOUTS, dtype=dtype)


def check_pool_of_bytes(backend):
    """A pool that is kept as uint8 is written through its fp8 view; the definition is applied to its numbers."""
    for dtype in FP8:
        pool = torch.randint(256, (2, 4, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        fp8 = pool.view(dtype)
        pool[~fp8.float().isfinite()] = 0
        spec = RotarySpec(128, True, default_inv_freq(100.0, 128))
        x, y = fp8[0].double().split(64, -1)
        angle = 7 * spec.inv_freq.double()
        turned = torch.cat((x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()), -1)
        largest = torch.finfo(dtype).max
        slots = [torch.tensor([0]), torch.tensor([1])]
        copy_rotate([fp8], [pool.clone().view(dtype)], *slots, torch.tensor([7]), spec, backend=backend)
        assert_rotated(pool[1].view(dtype), turned.clamp(-largest, largest).to(dtype))


def check_saturation_and_nan(backend, num_tokens):
    """Components that leave the range, NaN and their partners, beside ordinary ones."""
    angle = 2.5
    spec = RotarySpec(8, True, torch.full((4,), angle))
    for dtype in FP8:
        largest = torch.finfo(dtype).max
        key = torch.tensor([largest, -largest, float("nan"), 1.0, largest, -largest, 1.0, 2.0])
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        x_turned, y_turned = key[:4] * cos - key[4:] * sin, key[4:] * cos + key[:4] * sin
        expected = torch.cat((x_turned, y_turned))
        assert expected[0] < -largest
        assert expected[1] > largest
        expected = expected.clamp(-largest, largest)
        k = torch.zeros(2 * num_tokens, 1, 8)
        k[:num_tokens] = key
        k = k.to(dtype)
        v = k.clone()
        slots = torch.arange(num_tokens)
        delta = torch.ones(num_tokens, dtype=torch.int64)
        copy_rotate([k], [v], slots, slots + num_tokens, delta, spec, backend=backend)
        new = k[num_tokens:, 0].float()
        assert torch.equal(new.isnan(), expected.isnan().expand(num_tokens, 8))
        torch.testing.assert_close(
            new, expected.to(dtype).float().expand(num_tokens, 8), atol=0, rtol=0, equal_nan=True
        )
        assert torch.equal(raw(v)[num_tokens:], raw(v)[:num_tokens])


def test_pool_of_bytes():
    check_pool_of_bytes("torch")


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_saturation_and_nan(num_tokens):
    check_saturation_and_nan("torch", num_tokens)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_step_may_bring_in_many_tokens():
    """CUDA allows 65,535 programs on all axes of a grid but the first."""
    from test.unit.kernels.absent_gpu import launches_for

    num_tokens = 600_000
    loc, delta = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens, dtype=torch.int64)
    pools = [[torch.empty(2, 8, 128, dtype=torch.bfloat16)] * 3 for _ in range(2)]
    spec = RotarySpec(128, is_neox=True, inv_freq=default_inv_freq(10_000.0, 128))
    with torch.inference_mode(), launches_for(90, compiles=False) as launches:
        copy_rotate(*pools, loc, loc, delta, spec, backend="triton")
    (launch,) = launches
    assert max(launch.grid[1:]) <= 65_535
    assert launch.grid[0] * 4 >= num_tokens


def check_infinity(backend):
    """Of e5m2: kept where nothing turns, the largest number where it would turn."""
    spec = RotarySpec(2, True, torch.ones(1))
    k = torch.tensor([float("inf"), 0.0]).expand(3, 1, 2).to(torch.float8_e5m2)
    v = k.clone()
    copy_rotate([k], [v], *torch.tensor([[0, 0], [1, 2]]), torch.tensor([0, 1]), spec, backend=backend)
    assert k[1, 0].tolist() == [float("inf"), 0.0]
    assert k[2, 0].tolist() == [57344.0, 57344.0]


def test_infinity():
    check_infinity("torch")


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_delta_zero_keeps_every_byte_of_fp8(num_tokens, dtype):
    check_every_byte("torch", num_tokens, dtype)


def check_every_byte(backend, num_tokens, dtype):
    """All 256 codes, NaN of both signs among them, in K of delta 0, past the rotated dimensions of K, and in V."""
    spec = RotarySpec(8, True, default_inv_freq(10_000.0, 8))
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    v = codes.repeat(2 * num_tokens, 1, 1)
    v[num_tokens:] = 0
    k = v.clone()
    slots = torch.arange(num_tokens)
    for delta, kept in ((0, 0), (5, 8)):
        moves = torch.full((num_tokens,), delta)
        copy_rotate([k.view(dtype)], [v.view(dtype)], slots, slots + num_tokens, moves, spec, backend=backend)
        assert torch.equal(k[num_tokens:, :, kept:], k[:num_tokens, :, kept:])
        assert torch.equal(v[num_tokens:], v[:num_tokens])


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
        (r"k_buffers\[0\]: torch.uint8.*view", {"k_buffers": [torch.zeros(4, 1, 8, dtype=torch.uint8)]}),
        (r"v_buffers\[0\]: torch.bfloat16", {"v_buffers": [torch.zeros(4, 1, 8, dtype=torch.bfloat16)]}),
        (
            r"v_buffers\[0\]: torch.bfloat16",
            {"k_buffers": [torch.zeros(4, 1, 8).to(FP8[0])], "v_buffers": [torch.zeros(4, 1, 8, dtype=torch.bfloat16)]},
        ),
        (
            r"v_buffers\[0\]: torch.float8_e5m2",
            {"k_buffers": [torch.zeros(4, 1, 8).to(FP8[0])], "v_buffers": [torch.zeros(4, 1, 8).to(FP8[1])]},
        ),
        (r"v_buffers\[0\]: shape", {"v_buffers": [torch.zeros(5, 1, 8)]}),
        (r"v_buffers\[0\]: shape", {"v_buffers": [torch.zeros(4, 2, 8)]}),
        (r"v_buffers\[0\]: shape", {"v_buffers": [torch.zeros(4, 8)]}),
        (r"v_buffers\[0\]: on meta", {"v_buffers": [torch.zeros(4, 1, 8, device="meta")]}),
        ("dst_loc: on meta", {"dst_loc": torch.tensor([1], device="meta")}),
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
