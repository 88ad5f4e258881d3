"""Drift: the rows that show a drift and the tokens that get it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from sgl_kernel_ext.rotary import Turn

PRIOR = 8.0
"""Rows for which the mean over all chunks counts in the mean of one chunk, so that a chunk with few rows, or none,
follows the others. Not tuned: a few trial questions told 2, 8 and one mean for all chunks hardly apart."""


@dataclass(frozen=True)
class Drift:
    """Which rows show a drift and which tokens get it: the same at all layers that have the same rows.

    R rows of C chunks show it; N tokens get it. Requests stand one behind the other, each with a row or more.

    Attributes:
        rows: `[R]` int64, where they stand among the new K and V.
        row_slots: `[R]` int64, where their old K and V lie.
        row_bounds: `[C + 1]` int64 from 0 to R: the rows of chunk c are `row_bounds[c]` to `row_bounds[c + 1]`.
        peers: `[2, C]` int64: the first chunk of each chunk's request, and the one behind the request's last.
        back: turns the rows' K to position 0.
        slots: `[N]` int64, slots of the tokens, distinct; those of rows may be among them, and get it too.
        chunk: `[N]` int64, the chunk of each token.
        there: turns K from position 0 to the positions of the tokens.
        strength, prior: see the head of `add_drift`.
    """

    rows: torch.Tensor
    row_slots: torch.Tensor
    row_bounds: torch.Tensor
    peers: torch.Tensor
    back: Turn
    slots: torch.Tensor
    chunk: torch.Tensor
    there: Turn
    strength: float
    prior: float

    @cached_property
    def weights(self) -> torch.Tensor:
        """`[C, R]` fp32: strength x d_c as a weighted sum of d_r."""
        at = torch.arange(len(self.rows), device=self.rows.device)
        bounds = self.row_bounds[:, None]
        is_of = (at >= bounds[:-1]) & (at < bounds[1:])
        first, end = bounds[self.peers]
        is_peer = (at >= first) & (at < end)
        of_all = is_peer * (self.prior / (end - first))
        return ((is_of + of_all) / (is_of.sum(1, keepdim=True) + self.prior)).mul_(self.strength)

    @cached_property
    def parts(self) -> list[tuple[slice, torch.Tensor]]:
        """Tokens `[N]` in parts, each with the chunk of each of its tokens, or of all (`[1]`).

        On a CPU a part is of one chunk, so that what is added to it fits into the processor's cache. On a GPU there is
        one part, since finding the chunks would wait for the GPU.
        """
        if self.chunk.device.type != "cpu":
            return [(slice(None), self.chunk)]
        bounds = [0, *((self.chunk.diff() != 0).nonzero()[:, 0] + 1).tolist(), len(self.chunk)]
        return [(slice(a, b), self.chunk[a : a + 1]) for a, b in pairwise(bounds)]

    @cached_property
    def run(self) -> slice | None:
        """The slots, if they are consecutive; None if not. For a CPU only: this would wait for a GPU."""
        first, last = int(self.slots[0]), int(self.slots[-1])
        is_run = last - first == len(self.slots) - 1 and bool((self.slots.diff() == 1).all())
        return slice(first, last + 1) if is_run else None
