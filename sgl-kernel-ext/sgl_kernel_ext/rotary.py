"""Rotary embeddings as a value: one inverse frequency per pair of dimensions.

A key that is stored for position s is moved to position t if it is rotated by (t - s), whatever scaling the model uses,
as long as every pair of dimensions turns at a fixed speed. `RotarySpec` holds these speeds, with all scaling included.

    spec_from_sglang_rope(module)   read the spec from a rotary module, or refuse by name
    table_of(module)                the cos/sin table that the module really uses
    verify_spec(spec, table)        compare the spec with it, or raise
    rotation_table(spec, delta)     cos and sin of the angles a shift by `delta` positions turns through
    Turn(delta)                     the same, kept for several layers
    rotate(keys, new, cos, sin, spec)    keys turned by cos and sin, in torch; `turned_by` is the definition

`spec_from_sglang_rope` reads attributes and may be wrong for a version it was not written for; `verify_spec` proves the
spec against the table itself. Use both, always.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


class UnsupportedRotaryError(ValueError):
    """Keys of this rotary embedding cannot be moved to another position by a rotation."""


class RotaryMismatchError(ValueError):
    """The derived frequencies do not reproduce the model's own cos/sin table."""


@dataclass(frozen=True, eq=False)
class RotarySpec:
    """What a rotation of keys needs to know about the model.

    Attributes:
        rotary_dim: leading dimensions of a head that are rotated; even; the rest passes through.
        is_neox: pairs are (i, i + rotary_dim/2) when true, (2i, 2i + 1) when false.
        inv_freq: [rotary_dim/2] fp32, radians per position, final (all scaling applied).
        magnitude: factor on cos and sin in the model's table (attention factor of YaRN and LongRoPE). A stored key
            already carries it, so a shift never applies it; only `verify_spec` reads it.
    """

    rotary_dim: int
    is_neox: bool
    inv_freq: torch.Tensor
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim: {self.rotary_dim} must be a positive even number")
        if self.inv_freq.shape != (self.rotary_dim // 2,):
            raise ValueError(f"inv_freq: shape {tuple(self.inv_freq.shape)}, need ({self.rotary_dim // 2},)")
        if self.inv_freq.dtype != torch.float32:
            raise ValueError(f"inv_freq: dtype {self.inv_freq.dtype}, need torch.float32")

    def to(self, device: torch.device | str) -> RotarySpec:
        """The same spec with `inv_freq` on `device`; keep one per device, so that no call has to copy it."""
        return replace(self, inv_freq=self.inv_freq.to(device))


# --- cos and sin of a shift -------------------------------------------------------------------------------------------


def rotation_table(spec: RotarySpec, position_delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of `position_delta * inv_freq`.

    The product is computed in float64: in fp32 an angle of 1e6 radians is known to 0.06 only, in float64 to 1e-10. So
    the only difference from a key computed at the new position is the fp32 rounding of the model's own table, at most
    2**-24 of the angle.

    Args:
        position_delta: [n] int64, new position minus old position, any sign, any device.

    Returns:
        cos, sin: [n, rotary_dim/2] fp32 on the device of `position_delta`.
    """
    inv_freq = spec.inv_freq.to(device=position_delta.device, dtype=torch.float64)
    angle = position_delta.to(torch.float64)[:, None] * inv_freq
    return angle.cos().float(), angle.sin().float()


# Bounds the float64 temporaries of a table to about 25 MB at 128 rotary dimensions.
_TABLE_LEN = 16384


class Turn:
    """Cosines and sines of a rotation of keys; computed once for layers with the same rotary embedding.

    Args:
        by: `[n]` int64, positions to turn by.
    """

    def __init__(self, by: torch.Tensor) -> None:
        self.by = by
        self._spec: RotarySpec | None = None

    @classmethod
    def of(cls, by: torch.Tensor | Turn) -> Turn:
        """The turn by these positions; a `Turn` is returned as it is."""
        return by if isinstance(by, Turn) else cls(by)

    def table(self, spec: RotarySpec) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin: `[n, rotary_dim/2]` fp32."""
        if self._spec is not spec:
            parts = [rotation_table(spec, by) for by in self.by.split(_TABLE_LEN)]
            cos, sin = parts[0] if len(parts) == 1 else [torch.cat(part) for part in zip(*parts, strict=True)]
            self._spec, self._table = spec, (cos, sin)
        return self._table


def rotate(old: torch.Tensor, new: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spec: RotarySpec) -> None:
    """Turns keys `old` and writes them into `new`, another tensor of the same shape.

    Args:
        old, new: [n, num_kv_heads, head_dim] fp32.
        cos, sin: [n or 1, 1, rotary_dim/2] fp32.
    """
    rotary_dim, half = spec.rotary_dim, spec.rotary_dim // 2
    if spec.is_neox:
        pairs = slice(0, half), slice(half, rotary_dim)
    else:
        pairs = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    (x, y), (new_x, new_y) = ([t[..., p] for p in pairs] for t in (old, new))
    torch.mul(x, cos, out=new_x)
    new_x.addcmul_(y, sin, value=-1)
    torch.mul(y, cos, out=new_y)
    new_y.addcmul_(x, sin)
    if rotary_dim < old.shape[-1]:
        new[..., rotary_dim:] = old[..., rotary_dim:]


def turned_by(k: torch.Tensor, by: int, spec: RotarySpec | None) -> torch.Tensor:
    """One token's K `[num_kv_heads, head_dim]`, turned by the definition: pair i turns by `by` x inv_freq[i]."""
    if spec is None:
        return k
    half, new = spec.rotary_dim // 2, k.clone()
    for i, frequency in enumerate(spec.inv_freq.double().tolist()):
        a, b = (i, i + half) if spec.is_neox else (2 * i, 2 * i + 1)
        cos, sin = math.cos(by * frequency), math.sin(by * frequency)
        new[:, a], new[:, b] = k[:, a] * cos - k[:, b] * sin, k[:, b] * cos + k[:, a] * sin
    return new


# --- reading a rotary module ------------------------------------------------------------------------------------------


def default_inv_freq(base: float, rotary_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """base^(-2i/rotary_dim), [rotary_dim/2] fp32, computed on `device` (Su et al., RoFormer, section 3.2.2)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (base**exponent)


def linear_inv_freq(base: float, rotary_dim: int, factor: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Position interpolation: every position, hence every frequency, divided by `factor`."""
    return default_inv_freq(base, rotary_dim, device) / factor


def llama3_inv_freq(
    base: float,
    rotary_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_len: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend in between.

    `original_len` is the context length the model was trained with. The blend depends on the number of turns a pair
    makes over that length: with `low_freq_factor` or fewer it is fully scaled, with `high_freq_factor` or more kept.
    """
    inv_freq = default_inv_freq(base, rotary_dim, device)
    num_turns = original_len * inv_freq / (2 * math.pi)
    if low_freq_factor == high_freq_factor:
        kept = (num_turns >= low_freq_factor).float()
    else:
        kept = ((num_turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return inv_freq / factor * (1 - kept) + inv_freq * kept


def yarn_inv_freq(
    base: float,
    rotary_dim: int,
    factor: float,
    original_len: int,
    *,
    beta_fast: float = 32,
    beta_slow: float = 1,
    extrapolation_factor: float = 1,
    truncate: bool = True,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """YaRN "NTK by parts" (Peng et al., section 3.2): pairs with more than `beta_fast` turns over `original_len` keep
    their frequency, those with fewer than `beta_slow` are divided by `factor`, linear in the pair's index in between.
    """

    def index_of(num_turns: float) -> float:
        return rotary_dim * math.log(original_len / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
    kept = (1 - ramp.clamp(0, 1)) * extrapolation_factor
    inv_freq = default_inv_freq(base, rotary_dim, device)
    return inv_freq / factor * (1 - kept) + inv_freq * kept


def table_of(rope: Any) -> torch.Tensor | None:
    """`[num_positions, rotary_dim]` cos then sin, as a rotary module looks them up; None: it is no rotary module.

    LongRoPE has two tables in one. The second begins anew behind the original context, where rows no longer fit a spec;
    it is used only if a forward has a position beyond that context.
    """
    found = (getattr(rope, name, None) for name in ("cos_sin_cache", "long_short_cos_sin_cache"))
    return next((table for table in found if table is not None), None) if hasattr(rope, "rotary_dim") else None


def _device_of(rope: Any) -> torch.device | str:
    """Where a module computed its frequencies: where its table is, except on the CPU under `--rl-on-policy-target`."""
    table = table_of(rope)
    assert table is not None, "a module that is read has a table"
    return "cpu" if getattr(rope, "_force_native", False) else table.device


def _from_default(rope: Any) -> RotarySpec:
    if getattr(rope, "position_start", 0):
        raise UnsupportedRotaryError(f"RotaryEmbedding: position_start {rope.position_start} is not supported, need 0")
    inv_freq = default_inv_freq(rope.base, rope.rotary_dim, _device_of(rope))
    return RotarySpec(rope.rotary_dim, rope.is_neox_style, inv_freq)


def _from_linear(rope: Any) -> RotarySpec:
    factors = rope.scaling_factors
    if len(factors) != 1:
        raise UnsupportedRotaryError(f"LinearScalingRotaryEmbedding: {len(factors)} scaling factors, need exactly one")
    inv_freq = linear_inv_freq(rope.base, rope.rotary_dim, float(factors[0]), _device_of(rope))
    return RotarySpec(rope.rotary_dim, rope.is_neox_style, inv_freq)


def _from_llama3(rope: Any) -> RotarySpec:
    inv_freq = llama3_inv_freq(
        rope.base,
        rope.rotary_dim,
        rope.scaling_factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.orig_max_position,
        _device_of(rope),
    )
    return RotarySpec(rope.rotary_dim, rope.is_neox_style, inv_freq)


def _from_yarn(rope: Any) -> RotarySpec:
    inv_freq = yarn_inv_freq(
        rope.base,
        rope.rotary_dim,
        rope.scaling_factor,
        # This class is built with the original length under this name.
        rope.max_position_embeddings,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        extrapolation_factor=rope.extrapolation_factor,
        truncate=getattr(rope, "truncate", True),
        device=_device_of(rope),
    )
    return RotarySpec(rope.rotary_dim, rope.is_neox_style, inv_freq, magnitude=float(rope.mscale))


def _from_ntk(rope: Any) -> RotarySpec:
    """Dynamic NTK by `factor`: SGLang makes its table once, for the longest prompt, so frequencies are fixed."""
    factor = rope.scaling_factor
    return _with_larger_base(rope, factor * factor - (factor - 1))


def _from_ntk_alpha(rope: Any) -> RotarySpec:
    return _with_larger_base(rope, rope.scaling_alpha)


def _with_larger_base(rope: Any, by: float) -> RotarySpec:
    base = rope.base * by ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return RotarySpec(rope.rotary_dim, rope.is_neox_style, default_inv_freq(base, rope.rotary_dim, _device_of(rope)))


def _from_longrope(rope: Any) -> RotarySpec:
    """LongRoPE within the original context, where every forward uses the short factors (see `table_of`)."""
    device = _device_of(rope)
    factors = torch.tensor(rope.short_factor, dtype=torch.float32, device=device)
    inv_freq = default_inv_freq(rope.base, rope.rotary_dim, device) / factors
    return RotarySpec(rope.rotary_dim, True, inv_freq, magnitude=float(rope.short_mscale))


_READERS: dict[str, Callable[[Any], RotarySpec]] = {
    "RotaryEmbedding": _from_default,
    "LinearScalingRotaryEmbedding": _from_linear,
    "Llama3RotaryEmbedding": _from_llama3,
    "YaRNScalingRotaryEmbedding": _from_yarn,
    "DeepseekScalingRotaryEmbedding": _from_yarn,
    # In a text, all three coordinates of a token are its position.
    "MRotaryEmbedding": _from_default,
    "YaRNScalingMRotaryEmbedding": _from_yarn,
    "DynamicNTKScalingRotaryEmbedding": _from_ntk,
    "DynamicNTKAlphaRotaryEmbedding": _from_ntk_alpha,
    "Phi3LongRoPEScaledRotaryEmbedding": _from_longrope,
}

_REFUSED: dict[str, str] = {
    "BailingMRotaryEmbedding": "multimodal positions have three coordinates",
    "Ernie4_5_VLRotaryEmbedding": "multimodal positions have three coordinates",
    "DualChunkRotaryEmbedding": "dual-chunk attention keeps positions modulo a chunk size",
    "FourierRotaryEmbedding": "Fourier embeddings mix several frequencies in one dimension",
    "Gemma4RotaryEmbedding": "its rotated dimensions are not the leading ones of a head",
    "Llama4VisionRotaryEmbedding": "it turns with image patches, not with text positions",
}


def spec_from_sglang_rope(rope: Any) -> RotarySpec:
    """Read the spec of a rotary module of SGLang 0.5.23, by the name of its class; SGLang is not imported.

    Partial rotary embeddings (`rotary_dim` below the head's size) and both layouts are covered by each supported class.
    The class must match exactly: a subclass may change the formula.

    The frequencies are computed on the device where the module computed its own, with the same operations, so they are
    the same bits. On another they would differ: CUDA's powf is good to 4 ulp (CUDA C++ Programming Guide, mathematical
    functions), up to 8 * 2**-24 of the frequency, which at position 131072 turns a fast pair by up to 0.05 radians; and
    Llama 3's blend multiplies this error by up to (factor - 1) / 3, that is 10 for Llama 3.2.

    Raises:
        UnsupportedRotaryError: the class is known not to be a fixed rotation per position, or is not known at all.
    """
    name = type(rope).__name__
    reader = _READERS.get(name)
    if reader is not None:
        return reader(rope)
    reason = _REFUSED.get(name, "this rotary embedding is not known")
    supported = ", ".join(sorted(_READERS))
    raise UnsupportedRotaryError(f"{name}: {reason}; keys can be moved for {supported} only")


# --- the proof --------------------------------------------------------------------------------------------------------

# Error of an angle of the table, in units of 2**-24 of the angle: one for its fp32 product of position and frequency,
# the rest for frequencies of llama3 and yarn, which are computed in another order here.
_ANGLE_ULPS = 8


def verify_spec(spec: RotarySpec, cos_sin_cache: torch.Tensor, positions: torch.Tensor | None = None) -> None:
    """Check that `spec` reproduces the model's own table.

    Args:
        cos_sin_cache: [num_positions, rotary_dim], cos then sin, row i for position i; fp32, fp16 or bf16.
        positions: [n] int64, the rows to compare. None = every row. Pass the rows below the model's context length
            where later rows are never used: SGLang 0.5.23 extends the table of linear scaling with unscaled rows.

    Raises:
        RotaryMismatchError: a value differs by more than the rounding of the table allows.
    """
    half = spec.rotary_dim // 2
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[1] != spec.rotary_dim:
        raise RotaryMismatchError(
            f"cos_sin_cache: shape {tuple(cos_sin_cache.shape)}, need [num_positions, {spec.rotary_dim}]"
        )
    if positions is None:
        positions = torch.arange(cos_sin_cache.shape[0], device="cpu")
    table_eps = torch.finfo(cos_sin_cache.dtype).eps
    for block in positions.cpu().split(16384):  # keeps the float64 temporaries small for a table of 1M positions
        rows = cos_sin_cache[block.to(cos_sin_cache.device)].cpu().double()
        angle = block.double()[:, None] * spec.inv_freq.cpu().double()
        tolerance = spec.magnitude * (table_eps + 1e-6 + angle.abs() * _ANGLE_ULPS * 2.0**-24)
        error = torch.maximum(
            (rows[:, :half] - spec.magnitude * angle.cos()).abs(), (rows[:, half:] - spec.magnitude * angle.sin()).abs()
        )
        _raise_if_off(error, tolerance, block)


def _raise_if_off(error: torch.Tensor, tolerance: torch.Tensor, positions: torch.Tensor) -> None:
    bad = ~(error <= tolerance)  # also true where the table holds a NaN
    if bool(bad.any()):
        row, pair = bad.nonzero()[0].tolist()
        raise RotaryMismatchError(
            f"cos_sin_cache: position {int(positions[row])}, pair {pair} differs by {float(error[row, pair]):.3g} from "
            "the derived frequencies; this model's rotary embedding is not supported"
        )
