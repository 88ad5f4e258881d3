"""Host to device without waiting.

Verb: `upload` (several host arrays, in one copy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device | str) -> list[torch.Tensor]:
    """The arrays on `device`, by one copy that nobody waits for; views of one buffer, dtypes and shapes as given."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    view = packed.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    # Pinned memory is handed out again only behind the copies that read it.
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[offset : offset + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]
