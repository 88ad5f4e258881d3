"""add_drift in torch, for any device, and by its definition in float64, with which tests compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel_ext.add_drift.drift import Drift
from sgl_kernel_ext.backend import raw, rounded
from sgl_kernel_ext.rotary import RotarySpec, rotate, turned_by


def add_drift_torch(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    drift: Drift,
    spec: RotarySpec | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `add_drift`."""
    change_k = k_new[drift.rows].float() - k_buffer[drift.row_slots].float() * k_scale
    change_v = v_new[drift.rows].float() - v_buffer[drift.row_slots].float() * v_scale
    if spec is not None:
        change_k = _turned(change_k, drift.back.table(spec), spec)
    # A matrix product: a GPU does not promise the order of a sum by index.
    mean_k, mean_v = (
        (drift.weights @ change.flatten(1)).unflatten(1, change.shape[1:]) for change in (change_k, change_v)
    )
    for tokens, chunk in drift.parts:
        part_k = mean_k[chunk]
        if spec is not None:
            part_k = _turned(part_k, [part[tokens] for part in drift.there.table(spec)], spec)
        _add(k_buffer, drift, tokens, part_k, k_scale)
        _add(v_buffer, drift, tokens, mean_v[chunk], v_scale)


def _turned(keys: torch.Tensor, table: Sequence[torch.Tensor], spec: RotarySpec) -> torch.Tensor:
    """Keys `[n or 1, ...]` turned by a table of n positions."""
    turned = keys.new_empty(len(table[0]), *keys.shape[1:])
    rotate(keys, turned, *(part[:, None] for part in table), spec)
    return turned


def _add(buffer: torch.Tensor, drift: Drift, tokens: slice, change: torch.Tensor, scale: float) -> None:
    run = drift.run if buffer.device.type == "cpu" else None
    if run is not None and buffer.dtype == torch.float32:
        buffer[run][tokens].add_(change, alpha=1.0 / scale)
        return
    slots = drift.slots[tokens]
    found = buffer[slots].float().add_(change, alpha=1.0 / scale)
    raw(buffer)[slots] = raw(rounded(found, buffer.dtype))


def add_drift_reference(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    drift: Drift,
    spec: RotarySpec | None,
    *,
    row_positions: torch.Tensor,
    positions: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `drift.slots` after `add_drift`, float64 and not rounded, one row and one token at a time."""
    old_k, old_v = k_buffer.double() * k_scale, v_buffer.double() * v_scale
    changes = []
    for row, slot, position in zip(*(t.tolist() for t in (drift.rows, drift.row_slots, row_positions)), strict=True):
        changes.append(
            (turned_by(k_new[row].double() - old_k[slot], -position, spec), v_new[row].double() - old_v[slot])
        )
    bounds, peers = drift.row_bounds.tolist(), drift.peers.t().tolist()
    found_k, found_v = [], []
    for slot, chunk, position in zip(*(t.tolist() for t in (drift.slots, drift.chunk, positions)), strict=True):
        own = changes[bounds[chunk] : bounds[chunk + 1]]
        of_all = changes[slice(*(bounds[one] for one in peers[chunk]))]
        mean_k, mean_v = (
            (sum(change[i] for change in own) + drift.prior * sum(change[i] for change in of_all) / len(of_all))
            * (drift.strength / (len(own) + drift.prior))
            for i in range(2)
        )
        found_k.append(old_k[slot] + turned_by(mean_k, position, spec))
        found_v.append(old_v[slot] + mean_v)
    return torch.stack(found_k) / k_scale, torch.stack(found_v) / v_scale
