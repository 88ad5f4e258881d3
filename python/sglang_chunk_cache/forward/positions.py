"""Positions of the tokens of a batch, where SGLang's, which it counts from lengths, are not the true ones.

Verb: `stand_at`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def stand_at(batch: ForwardBatch, positions: torch.Tensor) -> None:
    """Has the tokens of a batch stand at `positions`, `[num_tokens]` int64, which stays as it is.

    With multimodal rope a token keeps how far its three coordinates are from its position: in a text not at all, behind
    images by as much as they have more tokens than positions. The batch gets a copy of `positions`: some models add to
    what they are given (Gemma 3 counts from 1).
    """
    if batch.mrope_positions is not None:
        batch.mrope_positions = batch.mrope_positions + (positions - batch.positions)
    batch.positions = positions.to(batch.positions.dtype, copy=True)
