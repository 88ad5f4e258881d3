"""Drifts to test `add_drift` with, in torch and in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel_ext.add_drift import Drift, add_drift
from sgl_kernel_ext.add_drift.naive import add_drift_reference
from sgl_kernel_ext.backend import raw
from sgl_kernel_ext.rotary import RotarySpec, Turn, default_inv_freq

NUM_SLOTS, NUM_ROWS = 60, 14
# First position, tokens and rows of each chunk; the second one shows nothing.
CHUNKS = ((5, 16, (0, 3, 4, 15)), (21, 7, ()), (30, 12, (2, 9)))
TOGETHER = ((0, 0, 0), (3, 3, 3))
APART = ((0, 0, 2), (2, 2, 3))


def spec_of(rotary_dim: int, is_neox: bool = True) -> RotarySpec:
    return RotarySpec(rotary_dim, is_neox, default_inv_freq(10_000.0, rotary_dim))


@dataclass
class Call:
    """Arguments of `add_drift`; new K and V have rows that show nothing, buffers slots that nobody may touch."""

    new: list[torch.Tensor]
    buffers: list[torch.Tensor]
    drift: Drift
    row_positions: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(
        cls,
        *,
        heads: int = 2,
        dims: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        consecutive: bool = False,
        peers: tuple[tuple[int, ...], ...] = TOGETHER,
    ) -> Call:
        rng = torch.Generator().manual_seed(0)
        positions = torch.cat([torch.arange(start, start + length) for start, length, _ in CHUNKS])
        chunk = torch.cat([torch.full((length,), i) for i, (_, length, _) in enumerate(CHUNKS)])
        row_positions = torch.tensor([start + row for start, _, rows in CHUNKS for row in rows])
        slot_of = torch.full((int(positions.max()) + 1,), -1)
        slots = torch.arange(9, 9 + len(positions)) if consecutive else torch.randperm(NUM_SLOTS, generator=rng)
        slot_of[positions] = slots[: len(positions)]
        bounds = torch.tensor([0, *(len(rows) for *_, rows in CHUNKS)]).cumsum(0)
        rows = torch.randperm(NUM_ROWS, generator=rng)[: len(row_positions)].sort().values
        back, there = Turn(-row_positions), Turn(positions)
        drift = Drift(
            rows, slot_of[row_positions], bounds, torch.tensor(peers), back, slot_of[positions], chunk, there, 0.5, 8.0
        )
        new = [torch.randn(NUM_ROWS, heads, dim, generator=rng).to(dtype) for dim in dims]
        buffers = [torch.randn(NUM_SLOTS, heads, dim, generator=rng).to(kv_dtype or dtype) for dim in dims]
        return cls(new, buffers, drift, row_positions, positions)

    def run(self, spec: RotarySpec | None, backend: str, **scales: float) -> list[torch.Tensor]:
        """The buffers afterwards."""
        buffers = [buffer.clone() for buffer in self.buffers]
        add_drift(*self.new, *buffers, self.drift, spec, backend=backend, **scales)
        return buffers

    def check(self, spec: RotarySpec | None, backend: str, tolerance: float, **scales: Any) -> None:
        """Slots of tokens as defined, all others as they were."""
        found = self.run(spec, backend, **scales)
        given = {"row_positions": self.row_positions, "positions": self.positions, **scales}
        expected = add_drift_reference(*self.new, *self.buffers, self.drift, spec, **given)
        spared = torch.ones(NUM_SLOTS, dtype=torch.bool).index_fill_(0, self.drift.slots, False)
        for one, its, before in zip(found, expected, self.buffers, strict=True):
            changed = raw(one)[self.drift.slots].view(one.dtype)
            torch.testing.assert_close(changed.double(), its, rtol=tolerance, atol=max(1e-5, tolerance / 8))
            assert torch.equal(raw(one)[spared], raw(before)[spared])
