"""Parts that several Triton kernels share: `LOG2_E`, `tanh`, `load_q`, and the options of products, `dot_options`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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


def dot_options(q: torch.Tensor) -> dict[str, object]:
    """`PRECISION` and `UPCAST` of a kernel that multiplies with q."""
    return {
        # TF32 keeps 10 bits of a mantissa: not enough where ratio 1.0 has to equal a full prefill.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        # The interpreter keeps bfloat16 as 16-bit integers and would multiply those.
        "UPCAST": triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
    }
