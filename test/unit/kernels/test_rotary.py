"""RotarySpec against SGLang's own rotary modules: a moved key equals the key computed at the new position."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.rotary_embedding.factory import get_rope
from torch.overrides import TorchFunctionMode

from sgl_kernel_ext import RotarySpec, UnsupportedRotaryError, copy_rotate, spec_from_sglang_rope, verify_spec
from sgl_kernel_ext.rotary import RotaryMismatchError, default_inv_freq, table_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-no-blend": LLAMA3 | {"high_freq_factor": 1.0},
    "yarn": YARN,
    "yarn-magnitude": YARN | {"attn_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.5, "truncate": False},
    "multimodal": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "multimodal-yarn": YARN | {"mrope_section": [2, 3, 3]},
    "ntk": {"rope_type": "dynamic", "factor": 2.0},
    "ntk-alpha": {"rope_type": "dynamic", "alpha": 3.0},
}
HEAD_DIM = 64
NUM_POSITIONS = 4096


def make_rope(scaling: str, *, is_neox: bool = True, partial: float = 1.0, base: float = 10_000.0, dtype=torch.float32):
    return get_rope(
        HEAD_DIM, HEAD_DIM, NUM_POSITIONS, base, is_neox, SCALINGS[scaling], dtype, partial_rotary_factor=partial
    )


def keys_at(rope, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, num_heads, HEAD_DIM] keys as the model stores them at `positions`."""
    flat = keys.reshape(len(keys), -1)
    return rope.forward_native(positions, flat.clone(), flat.clone())[1].view(keys.shape)


@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_moved_key_equals_key_computed_at_the_target(scaling, is_neox, partial):
    rope = make_rope(scaling, is_neox=is_neox, partial=partial)
    spec = spec_from_sglang_rope(rope)
    assert (spec.rotary_dim, spec.is_neox) == (int(HEAD_DIM * partial), is_neox)
    verify_spec(spec, rope.cos_sin_cache)

    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(200, 2, HEAD_DIM, generator=rng)
    old, new = (torch.randint(0, NUM_POSITIONS, (200,), generator=rng) for _ in range(2))
    new[:10] = old[:10]
    new[100:150] = torch.arange(300, 350)  # a chunk, moved as one
    old[100:150] = torch.arange(17, 67)
    k_buffer = torch.cat((keys_at(rope, keys, old), torch.full((200, 2, HEAD_DIM), float("nan"))))
    src = torch.arange(200)
    copy_rotate([k_buffer], [torch.zeros_like(k_buffer)], src, src + 200, new - old, spec)

    # The model's table is fp32: at position p its angles are off by up to p * 2**-24.
    tolerance = 4 * NUM_POSITIONS * 2.0**-24 * spec.magnitude
    torch.testing.assert_close(k_buffer[200:], keys_at(rope, keys, new), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("base", [500_000.0, 1_000_000])
def test_other_bases(scaling, base):
    rope = make_rope(scaling, base=base)
    verify_spec(spec_from_sglang_rope(rope), rope.cos_sin_cache)


class CudaPower(TorchFunctionMode):
    """A device whose powers are 4 units in the last place off, the most that CUDA's powf may be."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__rpow__:
            off = torch.where(torch.arange(len(result)) % 2 == 0, torch.inf, -torch.inf)
            for _ in range(4):
                result = torch.where(result == 1, result, torch.nextafter(result, off))  # a power of 0 is exact
        return result


# Llama 3.1 8B, Llama 3.2 1B, Qwen 2.5 with YaRN, Mistral Nemo; by their config.json.
LONG_ROPES = {
    "llama 3.1": (128, 5e5, {**LLAMA3, "original_max_position_embeddings": 8192}),
    "llama 3.2": (64, 5e5, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "qwen 2.5": (128, 1e6, {**YARN, "original_max_position_embeddings": 32768}),
    "nemo": (128, 1e6, None),
}


@pytest.mark.parametrize("name", LONG_ROPES)
def test_frequencies_are_those_of_the_device_that_made_the_table(name):
    dim, base, scaling = LONG_ROPES[name]
    with CudaPower():
        rope = get_rope(dim, dim, 131072 + 1, base, True, scaling, torch.float32)
        spec = spec_from_sglang_rope(rope)
    positions = torch.arange(130000, 131072)
    verify_spec(spec, rope.cos_sin_cache, positions)
    elsewhere = spec_from_sglang_rope(rope)
    with pytest.raises(RotaryMismatchError):
        verify_spec(elsewhere, rope.cos_sin_cache, positions)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_computed_where_the_table_is(scaling):
    rope = make_rope(scaling)
    table = SimpleNamespace(device=torch.device("meta"))
    on_meta = type(rope.__class__.__name__, (SimpleNamespace,), {})(**{**vars(rope), "cos_sin_cache": table})
    assert spec_from_sglang_rope(on_meta).inv_freq.device.type == "meta"
    on_meta._force_native = True  # SGLang computes them on the CPU then
    assert spec_from_sglang_rope(on_meta).inv_freq.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_of_16_bits_is_accepted_within_its_rounding(dtype):
    rope = make_rope("yarn")
    verify_spec(spec_from_sglang_rope(rope), rope.cos_sin_cache.to(dtype))


def test_rows_extended_by_the_server_are_checked_where_they_are_used():
    """SGLang extends a linearly scaled table with unscaled rows; the caller names the rows its model can reach."""
    rope = get_rope(HEAD_DIM, HEAD_DIM, 128, 10_000.0, True, SCALINGS["linear"], torch.float32)
    rope._ensure_cos_sin_cache_length(600)
    spec = spec_from_sglang_rope(rope)
    verify_spec(spec, rope.cos_sin_cache, torch.arange(512))
    with pytest.raises(RotaryMismatchError, match="position 512"):
        verify_spec(spec, rope.cos_sin_cache)


@pytest.mark.parametrize(("of", "against"), [("default", "linear"), ("llama3", "default"), ("yarn", "llama3")])
def test_another_scaling_is_found_out(of, against):
    spec = spec_from_sglang_rope(make_rope(of))
    with pytest.raises(RotaryMismatchError, match="position"):
        verify_spec(spec, make_rope(against).cos_sin_cache)


def test_a_slightly_wrong_frequency_is_found_out():
    rope = make_rope("default")
    spec = spec_from_sglang_rope(rope)
    off = spec.inv_freq.clone()
    off[20] *= 1.0001
    with pytest.raises(RotaryMismatchError, match="pair 20"):
        verify_spec(dataclasses.replace(spec, inv_freq=off), rope.cos_sin_cache)


def test_a_wrong_magnitude_or_nan_or_width_is_found_out():
    rope = make_rope("yarn")
    spec = spec_from_sglang_rope(rope)
    with pytest.raises(RotaryMismatchError, match="position 0"):
        verify_spec(dataclasses.replace(spec, magnitude=1.0), rope.cos_sin_cache)
    poisoned = rope.cos_sin_cache.clone()
    poisoned[77, 3] = float("nan")
    with pytest.raises(RotaryMismatchError, match="position 77, pair 3"):
        verify_spec(spec, poisoned)
    with pytest.raises(RotaryMismatchError, match="shape"):
        verify_spec(spec, rope.cos_sin_cache[:, :-2])


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "proportional"}, "Gemma4RotaryEmbedding"),
    ],
)
def test_modules_that_are_no_fixed_rotation_are_refused_by_name(scaling, name):
    rope = get_rope(HEAD_DIM, HEAD_DIM, 1024, 10_000, True, scaling, torch.float32)
    assert type(rope).__name__ == name
    with pytest.raises(UnsupportedRotaryError, match=name):
        spec_from_sglang_rope(rope)


def test_long_rope_is_a_fixed_rotation_within_its_original_context():
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 20 for i in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 512,
    }
    rope = get_rope(HEAD_DIM, HEAD_DIM, 2048, 10_000, True, scaling, torch.float32)
    spec = spec_from_sglang_rope(rope)
    assert spec.magnitude > 1.0
    verify_spec(spec, table_of(rope), torch.arange(512))
    with pytest.raises(RotaryMismatchError, match="position 512"):
        verify_spec(spec, table_of(rope), torch.arange(513))


def test_an_unknown_class_is_refused_by_name():
    with pytest.raises(UnsupportedRotaryError, match="SimpleNamespace: this rotary embedding is not known"):
        spec_from_sglang_rope(SimpleNamespace(rotary_dim=64))


@pytest.mark.parametrize(
    ("field", "args"),
    [
        ("rotary_dim", (7, True, torch.ones(3))),
        ("rotary_dim", (0, True, torch.ones(0))),
        ("inv_freq: shape", (8, True, torch.ones(8))),
        ("inv_freq: dtype", (8, True, torch.ones(4, dtype=torch.float64))),
    ],
)
def test_bad_specs_are_refused(field, args):
    with pytest.raises(ValueError, match=field):
        RotarySpec(*args)


def test_default_frequencies():
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(default_inv_freq(10_000.0, 8), expected)
