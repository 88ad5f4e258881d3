"""What the compiled kernels use, for GPUs that need not be there: no spills, shared memory, tensor cores.

Every launch of the self-test is compiled with the specialisations that it has there.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sgl_kernel_ext.self_test_cases import cases, common_shapes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Bytes that a program may have; sm_89 stands for consumer cards, whose limit the tiles of sm_80 keep too.
SHARED = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
TENSOR_CORES = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
MULTIPLIES = ("_sparse_extend_kernel", "_lse_kernel", "_received_kernel")
MULTIPLIES += ("_question_lse_kernel", "_question_received_kernel")
SHAPES = {str(shape): shape for shape in common_shapes()}
SINKS = "64/8 heads x 64, bfloat16, window 127, sinks"
FAST = [*((arch, "32/8 heads x 128, bfloat16") for arch in (80, 90, 100)), (90, SINKS)]
SLOW = [(arch, name) for arch in SHARED for name in SHAPES if (arch, name) not in FAST]
# Slower than they could be there, and right: these spill, or have more shared memory than a smaller card of the kind.
OVER = {
    (89, "28/4 heads x 128, bfloat16"), (89, "14/2 heads x 64, bfloat16"),
    (89, "32/8 heads x 128, bfloat16 float8_e4m3fn"), (89, "32/8 heads x 128, bfloat16 float8_e5m2"),
    (100, "32/8 heads x 128, bfloat16 float8_e4m3fn"), (100, "8/4 heads x 256, bfloat16, cap 50, window 4095"),
    (100, SINKS), (100, "14/2 heads x 64, bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *FAST,
        *(
            pytest.param(*case, marks=[pytest.mark.all, *([pytest.mark.xfail(strict=False)] if case in OVER else [])])
            for case in SLOW
        ),
    ],
    ids=str,
)
def test_no_spills_and_tensor_cores(arch, name):
    from test.unit.kernels.absent_gpu import launches_for, resources

    shape = SHAPES[name]
    with torch.inference_mode(), launches_for(arch) as launches:
        for case in cases(shape, torch.device("cpu")):
            case.run("triton")
    found = {(launch.kernel, launch.key): resources(launch.compiled) for launch in launches}
    for (kernel, _), used in found.items():
        assert used.stack == 0, f"{kernel}: {used}"
        assert used.shared <= SHARED[arch], f"{kernel}: {used}"
        if kernel in MULTIPLIES and shape.dtype != torch.float32:
            assert TENSOR_CORES[arch] in used.mma, f"{kernel}: {used}"
