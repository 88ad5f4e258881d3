"""DriftCorrection: adds what recomputing changed on average to the reused tokens that are not recomputed.

The correction is AgentKVShift's (arXiv 2607.21604); what differs stands in docs/related-work.md.

K and V of a reused token differ from those of a full prefill by something of its own and by something that it shares
with its neighbours, because all of them lack the same context. The recomputed tokens show the shared part
(`sgl_kernel_ext.add_drift` has the equations). Each layer is corrected before its attention reads K and V. The strength
is the option `drift`. docs/quality.md says what it is worth. Triton corrects requests of one strength at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from sgl_kernel_ext.add_drift import PRIOR, Drift, add_drift
from sgl_kernel_ext.backend import resolve_backend
from sgl_kernel_ext.rotary import RotarySpec, Turn
from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.row_choice import keep_where
from sglang_chunk_cache.kv.layer_kv import LayerKV


@dataclass(frozen=True)
class Reused:
    """The reused tokens of one request that is corrected.

    Attributes:
        request: its place in the batch.
        positions: `[N]` int64 prompt positions, ascending.
        chunk: `[N]` int64, which reused chunk each lies in, from 0.
        num_chunks: number of reused chunks.
        kv_slots: `[kv_len]` int64, the slot of each position.
        strength: in (0, 1].
    """

    request: int
    positions: torch.Tensor
    chunk: torch.Tensor
    num_chunks: int
    kv_slots: torch.Tensor
    strength: float


@dataclass(frozen=True)
class LeftRows:
    """The rows of one request that are left at a layer.

    Attributes:
        begin: its first row in the batch.
        positions: `[num_rows]` int64, ascending.
        chunk: `[num_rows]` int64, the reused chunk of each; -1 where it is not of a reused chunk.
        num_recomputed: rows that are of a reused chunk; the host knows it, so nothing waits for the device.
    """

    begin: int
    positions: torch.Tensor
    chunk: torch.Tensor
    num_recomputed: int


class DriftCorrection:
    """The correction of requests of one strength; `requests` are their places in the batch."""

    def __init__(self, requests: Sequence[Reused], kernel: str) -> None:
        self.requests = [one.request for one in requests]
        self._reused = requests
        self._kernel = kernel
        self._drift: Drift | None = None

    @classmethod
    def of(cls, requests: Sequence[Reused], kernel: str) -> list[DriftCorrection]:
        """Corrections of all requests: in Triton one for each strength, in torch one for each request, as is faster."""
        if requests and resolve_backend(kernel, requests[0].positions.device, "add_drift") != "triton":
            return [cls([one], kernel) for one in requests]
        by_strength = sorted(requests, key=lambda one: one.strength)
        return [cls(list(alike), kernel) for _, alike in groupby(by_strength, key=lambda one: one.strength)]

    def apply(
        self, k: torch.Tensor, v: torch.Tensor, stored: LayerKV, rotary: RotarySpec | None, num_unrotated: int = 0
    ) -> None:
        """Changes the K and V of one layer in the slots of the reused tokens.

        Slots of the rows are changed too: what they held is not needed any more, and their new KV is written next.

        Args:
            k, v: `[num_rows, num_kv_heads, head_dim]` of all rows of the batch, not written yet.
            stored: of the layer.
            rotary: of its keys; None where they carry no position.
            num_unrotated: leading dimensions of a key, in front of those that `rotary` applies to.
        """
        if self._drift is None:
            return
        rotated = slice(num_unrotated, None)
        add_drift(
            k[..., rotated],
            v,
            stored.k[..., rotated],
            stored.v,
            self._drift,
            rotary,
            k_scale=stored.k_scale,
            v_scale=stored.v_scale,
            backend=self._kernel,
        )

    def follow(self, left: Sequence[LeftRows]) -> None:
        """Sets the rows that are left from here on, of each of the `requests`."""
        self._drift = self._between(left)

    def _between(self, left: Sequence[LeftRows]) -> Drift | None:
        """The drift between recomputed and other reused tokens; None if no request has both."""
        pairs = [
            (one, rows)
            for one, rows in zip(self._reused, left, strict=True)
            if 0 < rows.num_recomputed < len(one.positions)
        ]
        if not pairs:
            return None
        index, at, row_slots, row_chunk, slots, chunk, peers = [], [], [], [], [], [], []
        num_chunks = 0
        for one, rows in pairs:
            recomputed = keep_where(rows.chunk >= 0, rows.num_recomputed)
            own = rows.positions[recomputed]
            index.append(_moved(recomputed, rows.begin))
            at.append(own)
            row_slots.append(one.kv_slots[own])
            row_chunk.append(_moved(rows.chunk[recomputed], num_chunks))
            slots.append(one.kv_slots[one.positions])
            chunk.append(_moved(one.chunk, num_chunks))
            peers += [(num_chunks, num_chunks + one.num_chunks)] * one.num_chunks
            num_chunks += one.num_chunks
        bounds, peers_on_device = upload(
            [np.arange(num_chunks + 1), np.array(peers).T.copy()], left[0].positions.device
        )
        return Drift(
            _joined(index),
            _joined(row_slots),
            torch.searchsorted(_joined(row_chunk), bounds),
            peers_on_device,
            Turn(-_joined(at)),
            _joined(slots),
            _joined(chunk),
            Turn(_joined([one.positions for one, _ in pairs])),
            self._reused[0].strength,
            PRIOR,
        )


def _moved(values: torch.Tensor, by: int) -> torch.Tensor:
    return values + by if by else values


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
