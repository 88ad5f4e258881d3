"""Parts that several Triton kernels share.

    tanh, load_q                parts of all attention kernels
    pointer_at                  where one of many tensors lies
    scores_of, add_in_log2      scores of rows and keys, and sums of their exponentials
    fp32_of_fp8, fp8_of_fp32    numbers from fp8 bytes, and back
    load_fp32                   stored K or V, fp8 or not
    pairs                       the dimensions that a rotation turns together
    operand                     an element of K or V as a factor of a matrix product
    dot_options, fp8_options    compile-time constants of the above
    score_options, scales_of    arguments of kernels that call `scores_of`
    addresses, constants        tables on the device that stay from call to call
    gpu_arch                    the GPU that is compiled for

fp8 is read and written as bytes. GPUs from sm_89 on convert it themselves. For older ones Triton has no e4m3, and its
interpreter's conversion loses NaN and carries. There integer arithmetic does the same, at twice the instructions per
element (30 instead of 15, counted in what ptxas makes for sm_90 of `copy_rotate` with 8 heads x 128).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_kernel_ext.transfer import upload

LOG2_E = 1.4426950408889634


@triton.jit
def tanh(x):
    # Through exp of a negative number only: never overflows.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def load_q(q_ptr, row_at, is_row, dim, HEAD_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, HEAD_PAD], 0 where there is no row; row_at is the offset of each row's head."""
    q = tl.load(q_ptr + row_at[:, None] + dim[None, :], mask=is_row[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@triton.jit
def fp32_of_fp8(raw, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    """The numbers that the bytes stand for, all exact: 3 bits of mantissa are e4m3fn, 2 are e5m2."""
    if HAS_FP8:
        return raw.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(tl.float32)
    bits = raw.to(tl.int32)
    if MANTISSA == 2:
        return (bits << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    # fp16 has one bit of exponent more and a bias that is larger by 8. Its NaNs have other bits.
    size = bits & 0x7F
    half = (((bits & 0x80) << 8) | (size << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where(size == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def fp8_of_fp32(x, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    """Bytes of the nearest finite numbers, ties to even; NaN stays NaN."""
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LARGEST: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    if HAS_FP8:
        # Without this, it depends on Triton's version whether too large a number becomes infinite.
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        return x.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if MANTISSA == 3 else 2.0**-14
    DROPPED: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Adding just less than half of the last kept bit's value rounds up what is above a tie; that bit decides a tie.
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # The last bit of this sum is worth the smallest fp8 number: the addition rounds to a multiple of it, and its low
    # bits count the multiples. Eight (or four) of them are the code of the smallest normal number.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    subnormal = (size + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (((x.to(tl.int32, bitcast=True) >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def load_fp32(ptr, at, mask, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    """What is stored, not scaled; 0 outside of the mask."""
    x = tl.load(ptr + at, mask=mask, other=0)
    return fp32_of_fp8(x, MANTISSA, HAS_FP8) if MANTISSA > 0 else x.to(tl.float32)


@triton.jit
def pairs(pair, HALF: tl.constexpr, IS_NEOX: tl.constexpr):
    """Both dimensions of each pair."""
    if IS_NEOX:
        return pair, pair + HALF
    return 2 * pair, 2 * pair + 1


@triton.jit
def operand(x, q, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr):
    """x in q's dtype, which holds every fp8 number; bytes where MANTISSA is above 0."""
    if MANTISSA == 0:
        return x.to(q.dtype)
    if HAS_FP8:
        return x.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(q.dtype)
    return fp32_of_fp8(x, MANTISSA, False).to(q.dtype)


@triton.jit
def pointer_at(table_ptr, i, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Entry i of an `AddressTable` as a pointer; without `IS_ALIGNED` Triton makes no 16-byte accesses."""
    ptr = tl.load(table_ptr + i).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def scores_of(
    q, k_ptr, k_at, is_key, dim, score_scale, logit_cap, HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, MANTISSA: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """[rows, keys] fp32 in units of log2, not masked; k_at are the offsets of the keys from k_ptr, the head's first."""
    at = k_at[None, :] + dim[:, None]
    k = tl.load(k_ptr + at, mask=is_key[None, :] & (dim < HEAD_DIM)[:, None], other=0)
    scores = tl.dot(q, operand(k, q, MANTISSA, HAS_FP8), input_precision=PRECISION) * score_scale
    return logit_cap * tanh(scores) if HAS_CAP else scores


@triton.jit
def add_in_log2(top, total, scores):
    """Adds 2**scores of [rows, any] to the running `total * 2**top` of each row, which begins as 0 * 2**-inf."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is no number
    return new_top, total * tl.exp2(top - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)


def dot_options(q: torch.Tensor) -> dict[str, object]:
    """`PRECISION` and `UPCAST` of a kernel that multiplies with q."""
    return {
        # TF32 keeps 10 bits of a mantissa: not enough where ratio 1.0 has to equal a full prefill.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        # The interpreter keeps bfloat16 as 16-bit integers and would multiply these.
        "UPCAST": triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
    }


def gpu_arch() -> int:
    """The architecture that Triton launches on, 90 for sm_90; 0 in its interpreter, or if it is not NVIDIA's."""
    if triton.knobs.runtime.interpret:
        return 0
    arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else 0


def fp8_options(dtype: torch.dtype) -> dict[str, object]:
    """`MANTISSA` and `HAS_FP8` of a kernel that reads buffers of `dtype`, given to it by `raw`."""
    mantissa = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 0)
    return {"MANTISSA": mantissa, "HAS_FP8": mantissa > 0 and gpu_arch() >= 89}


def score_options(q: torch.Tensor, group: int, k_dtype: torch.dtype, logit_cap: float) -> dict[str, Any]:
    """Options of a kernel that scores keys for rows of `q` [..., head_dim], `group` query heads to a key head."""
    head_dim = q.shape[-1]
    # No spills, and the 64 rows that sm_90's matrix products want.
    block_rows, block_keys = (16, 32) if q.element_size() == 4 else (64, 64 if head_dim <= 128 else 32)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(triton.next_power_of_2(head_dim), 16),
        "HAS_CAP": logit_cap > 0,
        "BLOCK_ROWS": block_rows,
        "BLOCK_KEYS": block_keys,
        **dot_options(q),
        **fp8_options(k_dtype),
        "num_warps": 4,
    }


def scales_of(sm_scale: float, logit_cap: float) -> tuple[float, float]:
    """`score_scale` and `logit_cap` of `scores_of`; a cap has a scale on both sides: cap * tanh(score / cap)."""
    return sm_scale / logit_cap if logit_cap > 0 else sm_scale * LOG2_E, logit_cap * LOG2_E


class AddressTable(NamedTuple):
    """Where some tensors lie, for a kernel that is given all of them."""

    on_device: torch.Tensor
    """[num_tensors] int64."""
    are_aligned: bool
    """Whether all lie at multiples of 16 bytes, which Triton cannot know of an address that a kernel loads."""


def addresses(tensors: Sequence[torch.Tensor]) -> AddressTable:
    """The addresses of tensors on one device; the table holds no tensor, so it is right for any that lie there.

    Raises:
        ValueError: Triton's interpreter would take addresses of a GPU for its own.
    """
    device = tensors[0].device
    if triton.knobs.runtime.interpret and device.type != "cpu":
        raise ValueError(f"backend: Triton's interpreter needs tensors on the CPU, not on {device}")
    values = tuple(tensor.data_ptr() for tensor in tensors)
    return AddressTable(constants(values, np.int64, device), all(value % 16 == 0 for value in values))


def constants(values: tuple[float, ...], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """[num_values] on the device, copied there once for all calls with equal values."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _constants(values, dtype, device, stream)


@functools.lru_cache(maxsize=1024)  # per stream: K and V addresses, of all layers together and of each by itself
def _constants(values: tuple[float, ...], dtype: type[np.generic], device: torch.device, stream: int) -> torch.Tensor:
    """`stream` serves only as a cache key: nobody waits for the copy, so only later work of its stream may read it."""
    return upload([np.array(values, dtype=dtype)], device)[0]


ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""How a kernel sees an element at an address; fp8 as bytes, `tl.uint8`."""
