"""add_drift in Triton's interpreter; run by test_triton.py in a process of its own (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext.backend import FP8
from unit.kernels.drifts import APART, Call, spec_of


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dims", [(16, 16), (20, 12), (80, 128)])
@pytest.mark.parametrize("spec", [spec_of(16), spec_of(12, is_neox=False), None], ids=["neox", "partial", "none"])
def test_equals_the_definition(spec, dims, heads):
    Call.make(dims=dims, heads=heads).check(spec, "triton", 1e-6)


def test_chunks_of_another_request_show_nothing():
    Call.make(peers=APART).check(spec_of(16), "triton", 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-11)])
def test_half_precision_is_rounded_once(dtype, tolerance):
    """The interpreter cuts bf16 off instead of rounding it."""
    Call.make(dtype=dtype).check(spec_of(16), "triton", tolerance)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_with_scales(dtype):
    call = Call.make(dtype=torch.bfloat16, kv_dtype=dtype)
    call.check(spec_of(16), "triton", 2.0**-3 if dtype == torch.float8_e4m3fn else 2.0**-2, k_scale=0.5, v_scale=2.0)


def test_many_tokens_of_a_chunk_and_wide_heads():
    """More rows and tokens than a program holds at one time, and the latent rows of MLA."""
    Call.make(heads=1, dims=(64, 512)).check(spec_of(64), "triton", 1e-6)


def test_a_last_dimension_that_is_not_dense_is_refused():
    call = Call.make()
    call.new[0] = call.new[0].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_new: stride"):
        call.run(spec_of(16), "triton")
