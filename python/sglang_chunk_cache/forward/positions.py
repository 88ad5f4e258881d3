"""True positions of the tokens of a batch, if those that SGLang counts from lengths are wrong.

Verb: `stand_at`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def stand_at(batch: ForwardBatch, positions: torch.Tensor) -> None:
    """Gives the tokens of a batch these `positions`, `[num_tokens]` int64, which stay as they are.

    With multimodal rope a token keeps the distance of its three coordinates from its position: none in a text; behind
    images, by how much their tokens outnumber their positions. The batch gets a copy of `positions`, since some models
    add to what they are given (Gemma 3 counts from 1).
    """
    if batch.mrope_positions is not None:
        batch.mrope_positions = batch.mrope_positions + (positions - batch.positions)
    batch.positions = positions.to(batch.positions.dtype, copy=True)
