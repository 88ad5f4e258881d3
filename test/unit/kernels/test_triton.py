"""The Triton kernels, run by Triton's interpreter on the CPU; test_budgets.py compiles them for GPUs.

TRITON_INTERPRET is read when Triton is imported and then holds for the whole process, so the interpreted tests run in
a process of their own and no other test sees the variable.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from unit.kernels.interpreter import passes_in_the_interpreter

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize(
    "operations",
    ["add_drift attention_mass copy_rotate kv_deviation question_mass", "sparse_extend"],
)
def test_in_the_interpreter(operations):
    passes_in_the_interpreter(*(HERE / f"interpreted_{operation}.py" for operation in operations.split()))


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
