"""Focused chunks: Cache-Craft's early termination (section 3.2.2, algorithm 1).

`focused_chunks` is one evaluation; `FocusTracker.update` collects the layers and says when the set has settled. All of
it stays on the device.

    c_i      mass(U -> C_i) summed over the layers so far; sorted descending
    diff_i   c_(i) - c_(i+1);   p_i = diff_i / sum;   h_i = -sum_{j<=i} p_j log p_j
    i*       argmax(h_{i+1} - h_i), the first one;   F = the chunks in front of the step that this is the term of

Chunks and layers count from 1 here. h_{i+1} - h_i = -p_{i+1} log p_{i+1} is the term of diff_{i+1}, so F = the i* + 1
largest chunks. Line 9 of the algorithm says "top i*": one chunk fewer if indices count from 1, two fewer if they count
from 0, as in the sum of line 7. Then of the masses 10, 9.5, 1, 0.9, 0.8 one or none would be focused, instead of two.
The set has settled at the first layer l >= `window` at which the sets of the last `window` layers are equal (line 11).

Where the paper is silent: for two chunks or fewer, or no difference at all, F = all chunks; 0 log 0 = 0.
"""

from __future__ import annotations

import torch


def focused_chunks(mass: torch.Tensor) -> torch.Tensor:
    """Bool `[num_chunks]`: which chunks are in F, for the summed `mass` `[num_chunks]`."""
    num_chunks = len(mass)
    if num_chunks <= 2:
        return torch.ones(num_chunks, dtype=torch.bool, device=mass.device)
    ordered, order = torch.sort(mass.double(), descending=True, stable=True)
    diff = ordered[:-1] - ordered[1:]
    total = diff.sum()
    p = diff / torch.where(total > 0, total, 1.0)
    gain = -torch.xlogy(p, p)[1:]  # h_{i+1} - h_i, without the rounding of the sums
    # argmax leaves open which of equal maxima it returns
    ranks = torch.arange(len(gain), device=mass.device)
    first = torch.where(gain == gain.max(), ranks, len(gain)).min()
    num_focused = torch.where(total > 0, first + 2, num_chunks)  # `first` counts from 0
    is_focused = torch.empty(num_chunks, dtype=torch.bool, device=mass.device)
    is_focused[order] = torch.arange(num_chunks, device=mass.device) < num_focused
    return is_focused


class FocusTracker:
    """The focused set of one request, layer by layer."""

    def __init__(self, num_chunks: int, window: int, device: torch.device) -> None:
        self._window = window
        self._mass = torch.zeros(num_chunks, dtype=torch.float32, device=device)
        self._sets: list[torch.Tensor] = []

    def update(self, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Adds mass(U -> C_i) `[num_chunks]` of the next layer.

        Returns:
            Whether the set has settled (bool scalar on the device), and the set (bool `[num_chunks]`); None in front of
            layer `window`.
        """
        self._mass += mass
        self._sets = [*self._sets, focused_chunks(self._mass)][-self._window :]
        if len(self._sets) < self._window:
            return None
        last = self._sets[-1]
        settled = torch.stack([(other == last).all() for other in self._sets]).all()
        return settled, last
