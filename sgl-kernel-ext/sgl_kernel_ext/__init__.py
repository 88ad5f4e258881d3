"""Kernels of the chunk cache: one folder per operation, each with an fp32 reference, a CPU path and a GPU path.

Importing the package needs torch only. Triton is imported when a Triton path is first used, so the package imports and
its torch paths run on a machine without CUDA and without Triton. Nothing here knows SGLang: tensors and numbers go in,
tensors come out.
"""

from __future__ import annotations

from sgl_kernel_ext.copy_rotate import copy_rotate
from sgl_kernel_ext.rotary import RotarySpec, UnsupportedRotaryError, spec_from_sglang_rope, verify_spec
from sgl_kernel_ext.sparse_extend import sparse_extend

__all__ = [
    "RotarySpec",
    "UnsupportedRotaryError",
    "copy_rotate",
    "sparse_extend",
    "spec_from_sglang_rope",
    "verify_spec",
]
