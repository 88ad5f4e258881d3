"""Drift: the mean change of recomputed tokens, added to tokens that were not recomputed.

    add_drift   in one layer: adds the mean change of each chunk's rows, at position 0, to the tokens of that chunk

    d_r = K_new(r) - K_old(r), turned back to position 0;  V_new(r) - V_old(r) likewise        for every row r
    d_c = (sum of d_r over the R_c rows of chunk c + prior x mean of d_r over its request's rows) / (R_c + prior)
    K(u) += strength x d_c, turned to the position of u;  V(u) += strength x d_c               for every token u of c

After AgentKVShift; the prior is ours. Sums are fp32 in one order, so equal calls give equal bits. Old K and V are read
before any is changed.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext.add_drift.drift import PRIOR, Drift
from sgl_kernel_ext.backend import Backend, resolve_backend
from sgl_kernel_ext.rotary import RotarySpec

__all__ = ["PRIOR", "Drift", "add_drift"]


def add_drift(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    drift: Drift,
    spec: RotarySpec | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend = "auto",
) -> None:
    """Changes K and V of one layer in `drift.slots`.

    Args:
        k_new: `[num_rows, num_kv_heads, head_dim]`; only `drift.rows` of it are read.
        v_new: `[num_rows, num_kv_heads, v_head_dim]`.
        k_buffer, v_buffer: `[num_slots, num_kv_heads, ...]`, written in place, rounded once; fp8 too.
        drift: at least one row and one token.
        spec: the model's rotation; None where keys carry no position.
        k_scale, v_scale: K and V are these times what is stored; for fp8.

    Raises:
        ValueError: shapes do not fit together; with "triton" also where the last dimension is strided.
    """
    _check(k_new, v_new, k_buffer, v_buffer, drift, spec)
    if resolve_backend(backend, k_new.device, "add_drift") == "triton":
        from sgl_kernel_ext.add_drift.triton import add_drift_triton as add
    else:
        from sgl_kernel_ext.add_drift.naive import add_drift_torch as add
    add(k_new, v_new, k_buffer, v_buffer, drift, spec, k_scale=k_scale, v_scale=v_scale)


def _check(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    drift: Drift,
    spec: RotarySpec | None,
) -> None:
    if k_new.shape[1:] != k_buffer.shape[1:] or v_new.shape[1:] != v_buffer.shape[1:] or len(k_new) != len(v_new):
        raise ValueError(
            f"k_new {tuple(k_new.shape)}, k_buffer {tuple(k_buffer.shape)}, v_new {tuple(v_new.shape)}, "
            f"v_buffer {tuple(v_buffer.shape)}: need the same heads of new and stored, and as many rows of K as of V"
        )
    for name, one, length in (
        ("rows", drift.rows, len(drift.rows)),
        ("row_slots", drift.row_slots, len(drift.rows)),
        ("row_bounds", drift.row_bounds, len(drift.row_bounds)),
        ("slots", drift.slots, len(drift.slots)),
        ("chunk", drift.chunk, len(drift.slots)),
    ):
        if one.shape != (length,) or one.dtype != torch.int64 or not length:
            raise ValueError(f"{name}: {one.dtype} {tuple(one.shape)}, need int64 ({max(length, 1)},)")
    if drift.peers.shape != (2, len(drift.row_bounds) - 1) or drift.peers.dtype != torch.int64:
        found = f"{drift.peers.dtype} {tuple(drift.peers.shape)}"
        raise ValueError(f"peers: {found}, need int64 (2, {len(drift.row_bounds) - 1})")
    if spec is not None and spec.rotary_dim > k_new.shape[2]:
        raise ValueError(f"spec: {spec.rotary_dim} rotary dimensions, but heads have {k_new.shape[2]}")
