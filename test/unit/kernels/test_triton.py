"""The Triton kernels, run by Triton's interpreter on the CPU and compiled for a GPU that need not be there.

TRITON_INTERPRET is read when Triton is imported and then holds for the whole process, so the interpreted tests run in
a process of their own and no other test sees the variable.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize("operation", ["attention_mass", "copy_rotate", "kv_deviation", "sparse_extend"])
def test_in_the_interpreter(operation):
    cases = HERE / f"interpreted_{operation}.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgl_kernel_ext.attention_mass.triton import _lse_kernel, _received_kernel
from sgl_kernel_ext.copy_rotate.triton import _copy_rotate_kernel
from sgl_kernel_ext.kv_deviation.triton import _kv_deviation_kernel
from sgl_kernel_ext.sparse_extend.triton import _choose_tile, _combine_splits_kernel, _sparse_extend_kernel

INT64 = ("indptr_ptr", "indices_ptr", "positions_ptr", "starts_ptr", "slots_ptr", "src_ptr", "dst_ptr", "delta_ptr")
FP32 = ("cos_ptr", "sin_ptr", "lse_ptr", "segment_lse_ptr", "received_ptr")

def shared_memory(kernel, dtype, constants, fp32=FP32, arch=90):
    def type_of(name):
        if name.endswith("_ptrs"):
            return "*i64"
        if name.endswith(INT64):
            return "*i64"
        if name in fp32:
            return "*fp32"
        if name.endswith("_ptr"):
            return "*" + dtype
        return "fp32" if name in ("sm_scale", "logit_cap") else "i32"

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    by_index = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=by_index)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "num_stages": 2})
    if constants.keys() & {"BLOCK_N", "BLOCK_KEYS"}:
        assert "mma" in compiled.asm["ptx"]  # the matrix products run on tensor cores
    return compiled.metadata.shared

m, n, _ = _choose_tile(128, 2, 7)
attention = dict(GROUP=7, TILE_ROWS=m // 7, HEAD_DIM=80, HEAD_PAD=128, V_DIM=80, V_PAD=128, REQUESTS_PAD=4,
                 HAS_CAP=True, BLOCK_M=m, BLOCK_N=n, PRECISION="tf32", UPCAST=False)
for num_splits in (1, 8):
    attention["NUM_SPLITS"] = num_splits
    assert shared_memory(_sparse_extend_kernel, "bf16", attention) <= 96 * 1024
combine = dict(V_DIM=80, V_PAD=128, NUM_SPLITS=8, SPLITS_PAD=8)
assert shared_memory(_combine_splits_kernel, "bf16", combine, fp32=(*FP32, "partial_ptr")) <= 96 * 1024
copy = dict(HALF=20, PASS_LEN=40, V_DIM=80, HALF_PAD=32, PASS_PAD=64, V_PAD=128, BLOCK_TOKENS=4, BLOCK_HEADS=8)
FP8 = [(tl.uint8, mantissa, *has) for mantissa in (2, 3) for has in ((True, 90), (True, 89), (False, 80))]
for element, mantissa, has_fp8, arch in [(tl.bfloat16, 0, False, 90), *FP8]:
    for is_neox in (True, False):
        copy |= dict(DTYPE=element, MANTISSA=mantissa, HAS_FP8=has_fp8, IS_ALIGNED=True, IS_NEOX=is_neox)
        assert shared_memory(_copy_rotate_kernel, None, copy, arch=arch) <= 96 * 1024
wide = copy | dict(DTYPE=tl.float32, MANTISSA=0, HALF=128, HALF_PAD=128, PASS_LEN=0, V_DIM=256, V_PAD=256,
                   IS_ALIGNED=False, BLOCK_TOKENS=2)
assert shared_memory(_copy_rotate_kernel, None, wide) <= 96 * 1024
mass = dict(GROUP=7, HEAD_DIM=80, HEAD_PAD=128, HAS_CAP=True, BLOCK_ROWS=32, BLOCK_KEYS=64, PRECISION="tf32",
            UPCAST=False)
assert shared_memory(_lse_kernel, "bf16", mass) <= 96 * 1024
assert shared_memory(_received_kernel, "bf16", mass | dict(SKIP_SELF=True)) <= 96 * 1024
deviation = dict(NUM_HEADS=6, HEADS_PAD=8, HALF=20, HALF_PAD=32, PASS_LEN=40, PASS_PAD=64, V_DIM=80, V_PAD=128,
                 IS_NEOX=False, HAS_SLOTS=True)
assert shared_memory(_kv_deviation_kernel, "bf16", deviation, fp32=(*FP32, "out_ptr")) <= 96 * 1024
"""


@needs_triton
def test_compiles_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter accepts more than the compiler does: types of branches, tile sizes, shared memory."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_import_needs_no_triton():
    """The package and its torch paths work where Triton cannot be imported."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from sgl_kernel_ext import RotarySpec, copy_rotate, sparse_extend
from sgl_kernel_ext.rotary import default_inv_freq
k = torch.ones(6, 1, 4); v = k.clone()
spec = RotarySpec(4, True, default_inv_freq(1e4, 4))
copy_rotate([k], [v], torch.tensor([0]), torch.tensor([5]), torch.tensor([3]), spec)
out = sparse_extend(torch.ones(1, 1, 4), k, v, [0, 3], torch.tensor([0, 1, 5]), [0, 1], torch.tensor([2]), sm_scale=1.0)
assert torch.allclose(out, torch.ones(1, 1, 4))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
