"""ChunkSums: what forwards have found of the chunks of one request, from which their statistics are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.system_prompt import piece_starts
from sgl_kernel_ext.transfer import Download


class _Found(NamedTuple):
    """What one forward found of a chunk: rows [begin, end) of the prompt; its sums begin at `at` of `sums`."""

    begin: int
    end: int
    sums: Download
    at: int


class ChunkSums:
    """Sums over layers for the chunks of one request, as far as they were computed."""

    def __init__(self, spans: Sequence[tuple[int, int]], num_layers: int) -> None:
        self._spans = spans
        self._num_layers = num_layers
        self._parts: dict[int, list[_Found]] = {}

    def add(self, chunk: int, begin: int, end: int, sums: Download, at: int) -> None:
        """Adds what a forward found that computed the positions [begin, end) of the prompt.

        Args:
            sums: float32; from `at` on `[end - begin]` outside, `[end - chunk's start]` received, `[chunk, 2]` on each
                earlier chunk and on the text behind it, and one on each piece of the system prompt.
        """
        self._parts.setdefault(chunk, []).append(_Found(begin, end, sums, at))

    def has(self, chunk: int) -> bool:
        """Whether anything of the chunk was computed."""
        return chunk in self._parts

    def is_there(self, chunk: int) -> bool:
        """Whether `statistics` returns at once."""
        return all(part.sums.is_there for part in self._parts[chunk])

    def statistics(self, chunk: int) -> ChunkStatistics:
        """Means over the layers."""
        start, end = self._spans[chunk]
        num_pieces = len(piece_starts(self._spans[0][0]))
        outside = torch.full((end - start,), float("nan"))
        received, on_context, on_system = (torch.zeros(n) for n in (end - start, 2 * chunk, num_pieces))
        for part in self._parts[chunk]:
            sizes = [part.end - part.begin, part.end - start, 2 * chunk, num_pieces]
            own = part.sums.read()[part.at : part.at + sum(sizes)].split(sizes)
            outside[part.begin - start : part.end - start] = own[0]
            received[: part.end - start] += own[1]
            on_context += own[2]
            on_system += own[3]
        outside, received, on_context, on_system = (
            sums / self._num_layers for sums in (outside, received, on_context, on_system)
        )
        bounds = [bound for span in self._spans[: chunk + 1] for bound in span][:-1]
        lens = np.diff(bounds)  # of a chunk and of the text behind it by turns
        return ChunkStatistics.taken(
            outside.numpy(),
            torch.where(outside.isnan(), outside, received).numpy(),
            inter=on_context.numpy()[lens > 0],
            intra=float(received.sum()),
            context_lens=lens[lens > 0].tolist(),
            system=on_system.numpy(),
        )
