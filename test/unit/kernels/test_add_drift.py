"""add_drift against its float64 definition, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_kernel_ext.add_drift import add_drift
from sgl_kernel_ext.backend import FP8
from unit.kernels.drifts import APART, Call, spec_of


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)])
@pytest.mark.parametrize("spec", [spec_of(16), spec_of(12, is_neox=False), None], ids=["neox", "partial", "none"])
def test_equals_the_definition(spec, dims, consecutive):
    Call.make(dims=dims, consecutive=consecutive).check(spec, "torch", 1e-6)


def test_chunks_of_another_request_show_nothing():
    Call.make(peers=APART).check(spec_of(16), "torch", 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_half_precision_is_rounded_once(dtype, tolerance):
    for consecutive in (False, True):
        Call.make(dtype=dtype, consecutive=consecutive).check(spec_of(16), "torch", tolerance)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_with_scales(dtype):
    call = Call.make(dtype=torch.bfloat16, kv_dtype=dtype)
    call.check(spec_of(16), "torch", 2.0**-3 if dtype == torch.float8_e4m3fn else 2.0**-2, k_scale=0.5, v_scale=2.0)


def test_by_hand():
    call = Call.make()
    drift = replace(call.drift, strength=1.0, prior=1.0)
    new = [torch.zeros_like(part) for part in call.new]
    buffers = [torch.zeros_like(part) for part in call.buffers]
    new[1][drift.rows[4:]] = 6.0  # V of the last chunk's two rows, out of six
    add_drift(*new, *buffers, drift, None)
    overall = 2 / 6 * 6.0
    by_chunk = torch.tensor([overall / 5, overall, (12.0 + overall) / 3])
    torch.testing.assert_close(buffers[1][drift.slots], by_chunk[drift.chunk][:, None, None].expand(-1, 2, 16))
    assert not buffers[0].any()


def test_what_rows_did_not_change_changes_nothing():
    call = Call.make()
    for new, buffer in zip(call.new, call.buffers, strict=True):
        new[call.drift.rows] = buffer[call.drift.row_slots]
    for found, before in zip(call.run(spec_of(16), "torch"), call.buffers, strict=True):
        assert torch.equal(found, before)


def test_arguments_that_do_not_fit_are_named():
    call = Call.make()
    with pytest.raises(ValueError, match="need the same heads of new and stored"):
        add_drift(call.new[0][:, :1], call.new[1], *call.buffers, call.drift, None)
    with pytest.raises(ValueError, match=r"chunk: torch.int64 \(3,\), need int64 \(35,\)"):
        add_drift(*call.new, *call.buffers, replace(call.drift, chunk=call.drift.chunk[:3]), None)
    with pytest.raises(ValueError, match=r"slots: torch\.int32"):
        add_drift(*call.new, *call.buffers, replace(call.drift, slots=call.drift.slots.int()), None)
    with pytest.raises(ValueError, match="spec: 32 rotary dimensions, but heads have 16"):
        add_drift(*call.new, *call.buffers, call.drift, spec_of(32))
