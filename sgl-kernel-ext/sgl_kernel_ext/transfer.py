"""Transfers between host and device that nobody waits for.

    upload         several host arrays to the device, in one copy
    upload_groups  the same for several lists of arrays, which come back as lists
    Download       one tensor of the device to the host: it is read once it is there
    host_buffer    memory of the host for such copies

All use page-locked memory: with any other, the driver may let a copy wait for the stream.
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
    places: dict[np.dtype[Any], list[int]] = {}
    for i, array in enumerate(arrays):
        places.setdefault(array.dtype, []).append(i)
    sizes = [sum(arrays[i].nbytes for i in group) for group in places.values()]
    begins = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    packed = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    on_host = packed.numpy()
    for begin, size, (dtype, group) in zip(begins, sizes, places.items(), strict=False):
        np.concatenate([arrays[i].reshape(-1) for i in group], out=on_host[begin : begin + size].view(dtype))
    # The allocator reuses pinned memory only behind the copies that read it.
    on_device = packed.to(device, non_blocking=True)
    uploaded: list[torch.Tensor | None] = [None] * len(arrays)
    for begin, size, (dtype, group) in zip(begins, sizes, places.items(), strict=False):
        # One operation makes all views of a dtype, however many there are.
        same = on_device[begin : begin + size].view(torch.from_numpy(np.empty(0, dtype)).dtype)
        for i, view in zip(group, same.split([arrays[i].size for i in group]), strict=True):
            uploaded[i] = view if arrays[i].ndim == 1 else view.view(arrays[i].shape)
    return [tensor for tensor in uploaded if tensor is not None]


def upload_groups(groups: Sequence[Sequence[npt.NDArray[Any]]], device: torch.device | str) -> list[list[torch.Tensor]]:
    """The arrays of all groups on `device`, by one copy as of `upload`; a list for each group, some of them empty."""
    arrays = [array for group in groups for array in group]
    uploaded = iter(upload(arrays, device) if arrays else ())
    return [[next(uploaded) for _ in group] for group in groups]


def host_buffer(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host for copies that nobody waits for, not initialised; ordinary memory where there is no GPU.

    PyTorch rounds page-locked blocks up to powers of two and keeps freed ones: they take up to twice their bytes.
    """
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=_has_gpu())


def _has_gpu() -> bool:
    return torch.cuda.is_available()


class Download:
    """A tensor on its way to the host, behind what the current stream has been given so far.

    Args:
        tensor: made on the current stream; it must not be changed any more, but may be freed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._value = tensor
            return
        self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._value.copy_(tensor, non_blocking=True)
        self._event = torch.get_device_module(tensor.device).Event()
        self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether `read` returns at once."""
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        """The tensor on the host; waits until it is there."""
        if not self.is_there:
            self._event.synchronize()
        return self._value
