"""Which implementation of an operation runs: the rule that every dispatcher of this package shares.

`resolve_backend` turns a caller's choice into the name of an implementation. It reads only the device of the tensors,
so the answer is the same for every layer and on every rank. `check_dense` refuses what the Triton paths cannot read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

Backend: TypeAlias = str
"""auto, torch, triton or flashinfer; from a configuration, so `resolve_backend` refuses another.

"triton without add_drift, kv_deviation" is triton, except for these operations, which use torch (`without`).
"""
Implementation = Literal["torch", "triton", "flashinfer"]
_WITHOUT = " without "


def without(backend: str, operations: Sequence[str]) -> Backend:
    """`backend`, except for these operations (names of their folders), which use torch."""
    return f"{backend}{_WITHOUT}{', '.join(operations)}" if operations else backend


def resolve_backend(
    backend: str, device: torch.device, operation: str = "", *, has_flashinfer: bool = False
) -> Implementation:
    """Name the implementation of an operation for tensors on `device`.

    "auto" is Triton on a CUDA device where Triton is installed, torch elsewhere. An explicit choice is kept: "triton"
    with CPU tensors is legal, as Triton's interpreter runs it. With "flashinfer", operations that have no FlashInfer
    version use Triton's.

    Raises:
        ValueError: `backend` is not one of the four names.
    """
    backend, _, others = backend.partition(_WITHOUT)
    if operation in others.split(", ") and operation:
        return "torch"
    if backend == "flashinfer":
        return "flashinfer" if has_flashinfer else "triton"
    if backend == "auto":
        has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return "triton" if has_triton else "torch"
    if backend == "torch":
        return "torch"
    if backend == "triton":
        return "triton"
    raise ValueError(f"backend: {backend!r} is not known; use 'auto', 'torch', 'triton' or 'flashinfer'")


def check_dense(**tensors: torch.Tensor) -> None:
    """Checks that the last of three dimensions lies in consecutive elements.

    Raises:
        ValueError: it does not; the message names the argument.
    """
    for name, tensor in tensors.items():
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}: stride {tensor.stride(2)} of the last dimension, need 1")


def check_sinks(sinks: torch.Tensor | None, num_q_heads: int) -> None:
    """Checks that attention sinks, if there are any, are one per query head.

    Raises:
        ValueError: they are not.
    """
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}, need one of each query head, [{num_q_heads}]")


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, fp8 as bytes; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8 else tensor


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` in `dtype`; in fp8 they saturate at its finite range, whatever torch's own conversion does there."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)  # keeps NaN
    return values.to(dtype)
