"""DriftCorrection: what recomputing changed on average, added to the reused tokens that are not recomputed. *Ours*.

K and V of a reused token differ from those of a full prefill by something of its own and by something that it shares
with its neighbours, because all of them lack the same context. The tokens that are recomputed show what is shared:

    d_t = K_new(t) - K_old(t), turned back to position 0;  V_new(t) - V_old(t) likewise
    d_c = (sum of d_t over the R_c rows of chunk c + PRIOR x mean of d_t over all rows) / (R_c + PRIOR)
    K(u) += s d_c turned to the position of u,  V(u) += s d_c  for every token u of chunk c that is not recomputed

layer by layer, before the attention of the layer reads them; s is the option `drift`. docs/quality.md says what it is
worth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_kernel_ext.rotary import RotarySpec, rotate, rotation_table
from sglang_chunk_cache.kv.choose import keep_where
from sglang_chunk_cache.kv.layer_kv import add
from sglang_chunk_cache.selection.base import RowsAtLayer

PRIOR = 8.0
"""Rows that the mean over all chunks counts for in a chunk's own, so that a chunk with few rows, or none, follows the
others. Not tuned: a few trial questions told 2, 8 and one mean for all chunks hardly apart."""


class _Sides(NamedTuple):
    """Who shows a drift and who gets it, while the rows stay the same; N reused tokens, R of them rows, C chunks."""

    rows: torch.Tensor  # [R] int64, into all rows of the request
    weights: torch.Tensor  # [C, R] fp32: s d_c as a weighted sum of d_t
    others: torch.Tensor  # [N - R] int64, prompt positions
    chunk: torch.Tensor  # [N - R] int64
    back: _Turn  # of the R rows, to position 0
    there: _Turn  # from position 0 to those of the others


class _Turn:
    """Rotation of keys by `[n]` int64 positions; the angles are computed once for layers with the same rotary."""

    def __init__(self, by: torch.Tensor) -> None:
        self._by = by
        self._rotary: RotarySpec | None = None

    def __call__(self, keys: torch.Tensor, rotary: RotarySpec | None) -> torch.Tensor:
        """`keys` `[n, num_kv_heads, head_dim]` fp32, turned."""
        if rotary is None:
            return keys
        if self._rotary is not rotary:
            cos, sin = rotation_table(rotary, self._by)
            self._rotary, self._angles = rotary, (cos[:, None], sin[:, None])
        turned = torch.empty_like(keys)
        rotate(keys, turned, *self._angles, rotary)
        return turned


class DriftCorrection:
    """Of one request.

    Args:
        positions: `[N]` int64 prompt positions of all reused tokens, ascending.
        chunk: `[N]` int64, which reused chunk each lies in, from 0.
        strength: s in (0, 1].
    """

    def __init__(self, positions: torch.Tensor, chunk: torch.Tensor, num_chunks: int, strength: float) -> None:
        self._strength = strength
        self._positions, self._chunk, self._num_chunks = positions, chunk, num_chunks
        self._row_positions: torch.Tensor | None = None
        self._sides: _Sides | None = None

    def apply(self, rows: RowsAtLayer, positions: torch.Tensor, row_chunk: torch.Tensor, num_recomputed: int) -> None:
        """Changes the K and V of this layer in the slots of the reused tokens that are not among the rows.

        Args:
            rows: of the request; their own K and V are not written yet.
            positions: `[num_rows]` int64, those of the rows; the same tensor as long as the rows are the same.
            row_chunk: `[num_rows]` int64, the reused chunk of each row; -1 where it is not of a reused chunk.
            num_recomputed: rows that are; the host knows it, so the device is not asked.
        """
        if num_recomputed in (0, len(self._positions)):
            return
        if self._row_positions is not positions:
            self._row_positions = positions
            self._sides = self._prepare(positions, row_chunk, num_recomputed, len(rows.kv_slots))
        sides = self._sides
        assert sides is not None
        slots = rows.slots()[sides.rows]
        stored = rows.stored
        k, k_buffer = rows.k[..., rows.num_unrotated :], stored.k[..., rows.num_unrotated :]
        drift_k = sides.back(k[sides.rows].float() - k_buffer[slots].float() * stored.k_scale, rows.rotary)
        drift_v = rows.v[sides.rows].float() - stored.v[slots].float() * stored.v_scale
        mean_k, mean_v = (
            (sides.weights @ drift.flatten(1)).unflatten(1, drift.shape[1:]) for drift in (drift_k, drift_v)
        )
        others = rows.kv_slots[sides.others]
        add(k_buffer, others, sides.there(mean_k[sides.chunk], rows.rotary), stored.k_scale)
        add(stored.v, others, mean_v[sides.chunk], stored.v_scale)

    def _prepare(self, positions: torch.Tensor, row_chunk: torch.Tensor, num_recomputed: int, kv_len: int) -> _Sides:
        device = positions.device
        recomputed = keep_where(row_chunk >= 0, num_recomputed)
        is_row = torch.zeros(kv_len, dtype=torch.bool, device=device).index_fill_(0, positions[recomputed], True)
        kept = keep_where(is_row[self._positions].logical_not(), len(self._positions) - num_recomputed)
        others = self._positions[kept]
        # A product and not a sum by index, whose order a GPU does not promise.
        is_of = row_chunk[recomputed][None, :] == torch.arange(self._num_chunks, device=device)[:, None]
        weights = (is_of + PRIOR / num_recomputed) / (is_of.sum(1, keepdim=True) + PRIOR) * self._strength
        return _Sides(
            recomputed,
            weights.float(),
            others,
            self._chunk[kept],
            back=_Turn(-positions[recomputed]),
            there=_Turn(others),
        )
