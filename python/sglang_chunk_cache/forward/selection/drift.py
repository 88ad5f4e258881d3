"""DriftCorrection: what recomputing changed on average, added to the reused tokens that are not recomputed.

The correction is AgentKVShift's (arXiv 2607.21604); what differs stands in docs/related-work.md.

K and V of a reused token differ from those of a full prefill by something of its own and by something that it shares
with its neighbours, because all of them lack the same context. The tokens that are recomputed show what is shared
(`sgl_kernel_ext.add_drift` has the equations), layer by layer, before the attention of the layer reads it. Its strength
is the option `drift`. docs/quality.md says what it is worth.
"""

from __future__ import annotations

import torch

from sgl_kernel_ext.add_drift import PRIOR, Drift, add_drift
from sgl_kernel_ext.rotary import Turn
from sglang_chunk_cache.forward.row_choice import keep_where
from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer


class DriftCorrection:
    """The correction of one request.

    Args:
        positions: `[N]` int64 prompt positions of all reused tokens, ascending.
        chunk: `[N]` int64, which reused chunk each lies in, from 0.
        strength: in (0, 1].
    """

    def __init__(self, positions: torch.Tensor, chunk: torch.Tensor, num_chunks: int, strength: float) -> None:
        self._strength = strength
        self._positions, self._chunk, self._num_chunks = positions, chunk, num_chunks
        self._there = Turn(positions)
        self._row_positions: torch.Tensor | None = None
        self._drift: Drift | None = None

    def apply(self, rows: RowsAtLayer, positions: torch.Tensor, row_chunk: torch.Tensor, num_recomputed: int) -> None:
        """Changes the K and V of this layer in the slots of the reused tokens.

        Those of the rows are changed too: what they held is not needed any more, and their own is written next.

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
            self._drift = self._of_rows(rows, positions, row_chunk, num_recomputed)
        assert self._drift is not None
        stored, rotated = rows.stored, slice(rows.num_unrotated, None)
        add_drift(
            rows.k[..., rotated],
            rows.v,
            stored.k[..., rotated],
            stored.v,
            self._drift,
            rows.rotary,
            k_scale=stored.k_scale,
            v_scale=stored.v_scale,
            backend=rows.kernel,
        )

    def _of_rows(
        self, rows: RowsAtLayer, positions: torch.Tensor, row_chunk: torch.Tensor, num_recomputed: int
    ) -> Drift:
        recomputed = keep_where(row_chunk >= 0, num_recomputed)
        at = positions[recomputed]
        chunks = torch.arange(self._num_chunks + 1, device=positions.device)
        return Drift(
            recomputed,
            rows.kv_slots[at],
            torch.searchsorted(row_chunk[recomputed], chunks),
            Turn(-at),
            rows.kv_slots[self._positions],
            self._chunk,
            self._there,
            self._strength,
            PRIOR,
        )
