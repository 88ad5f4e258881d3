"""StateLayout: which layers of one rank keep states, and how large a transition of theirs is in one part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_kernel_ext.transfer import host_buffer
from sglang_chunk_cache.kv.transition import LayerTransition, Rule, Transition


@dataclass(frozen=True, slots=True)
class StateLayout:
    """See the head of this file. If two servers have equal layouts, a transition of one means the same to the other.

    Attributes:
        layer_ids: of the layers, ascending.
        heads: of a state of this rank.
        key_size, value_size: of a head.
        channels: of the convolutions of this rank.
        width: kernel - 1 of the convolutions.
        tail_dtype, state_dtype: as torch names them; operators and offsets are float32.
        seam_len: tokens of a chunk in front of those whose transition is taken.
    """

    layer_ids: tuple[int, ...]
    heads: int
    key_size: int
    value_size: int
    channels: int
    width: int
    tail_dtype: str
    state_dtype: str
    seam_len: int

    @property
    def parts(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and dtypes of operator, offset and tail of one layer."""
        return (
            ((self.heads, self.key_size, self.key_size), torch.float32),
            ((self.heads, self.value_size, self.key_size), torch.float32),
            ((self.channels, self.width), self._tail_dtype),
        )

    @property
    def part_lens(self) -> tuple[int, ...]:
        """Bytes of each of `parts`."""
        return tuple(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of a transition, of a chunk of any length."""
        return len(self.layer_ids) * sum(self.part_lens)

    def empty(self) -> Transition:
        """A transition in memory for copies to a GPU, not initialised."""
        layers = []
        for _ in self.layer_ids:
            operator, offset, tail = (host_buffer(shape, dtype) for shape, dtype in self.parts)
            layers.append(LayerTransition((Rule(operator, offset),), (tail,)))
        return Transition(tuple(layers))

    def composed(self, transition: Transition) -> Transition:
        """A transition of at least one rule, in one part."""
        return Transition(tuple(layer.composed(self.width, self._tail_dtype) for layer in transition.layers))

    @property
    def _tail_dtype(self) -> torch.dtype:
        return getattr(torch, self.tail_dtype)
