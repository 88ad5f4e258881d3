"""Transition: what a stretch of tokens does to the states of a model.

A layer of the gated delta rule has a state S `[value size, key size]` a head, which a token changes by

    S <- exp(g) S;    S <- S + beta (v - S k) k^T

(Yang et al., 2412.06464, eq. 10). So a stretch of tokens is an affine map of the state in front of it, S <- S A + B,
whatever that state is, and whoever has A and B of a passage needs none of its tokens (HYPIC, 2607.01299). The
convolution in front of the rule reads its last inputs, the `tail`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl_kernel_ext.transfer import host_buffer


class Rule(NamedTuple):
    """A `[heads, key size, key size]` and B `[heads, value size, key size]` of one layer."""

    operator: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class LayerTransition:
    """What tokens do to one layer, in the parts in which they were computed.

    Attributes:
        rules: in order; a part within a seam has none.
        tails: `[channels, at most kernel - 1]` of each part.
    """

    rules: tuple[Rule, ...]
    tails: tuple[torch.Tensor, ...]

    def then(self, later: LayerTransition) -> LayerTransition:
        """This one, then `later`."""
        return LayerTransition(self.rules + later.rules, self.tails + later.tails)

    def composed(self, width: int, dtype: torch.dtype) -> LayerTransition:
        """The same in one part: S A + B, then S A' + B', is S A A' + (B A' + B'), from the first rule on, in float32.

        Args:
            width, dtype: of the tail.
        """
        if len(self.rules) == len(self.tails) == 1 and self.tails[0].dtype == dtype:
            return self
        operator, offset = self.rules[0]
        for later in self.rules[1:]:
            operator, offset = operator @ later.operator, offset @ later.operator + later.offset
        tail = self.tail(width, operator.device).to(dtype)
        return LayerTransition((Rule(on_host(operator), on_host(offset)),), (on_host(tail),))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Operator, offset and tail, in one part."""
        (rule,), (tail,) = self.rules, self.tails
        return (*rule, tail)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for parts in (self.tails, *self.rules) for part in parts)

    def tail(self, width: int, device: torch.device) -> torch.Tensor:
        """`[channels, width]` the last inputs of the convolution; on `device` where they come from several parts."""
        last = self.tails[-1]
        if last.shape[1] >= width:
            return last
        return torch.cat([part.to(device, non_blocking=True) for part in self.tails], dim=1)[:, -width:]


@dataclass(frozen=True)
class Transition:
    """What tokens do to all layers that keep states, in the order of the layers; in host memory."""

    layers: tuple[LayerTransition, ...]

    def then(self, later: Transition) -> Transition:
        """This one, then `later`."""
        return Transition(tuple(one.then(other) for one, other in zip(self.layers, later.layers, strict=True)))

    @property
    def num_rules(self) -> int:
        """Rules of each layer; all layers have equally many."""
        return len(self.layers[0].rules)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, made behind what the stream was given; copy from it on the same stream."""
    return host_buffer(value.shape, value.dtype).copy_(value, non_blocking=True)
