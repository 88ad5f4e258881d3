"""Host arrays on a device: as they were, by one copy."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_kernel_ext import transfer

ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.array([True]),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.empty(0, dtype=np.int64),
    np.arange(3, dtype=np.int32)[::-1],
    np.array([0.5], dtype=np.float32),
    np.frombuffer(np.arange(9, dtype=np.int64).tobytes(), dtype=np.int64)[2:],  # read-only, such as token ids
)


@pytest.fixture(params=["cpu", "cuda"])
def on(request, monkeypatch):
    """The device whose way is taken; the way to a GPU ends in ordinary memory, since there need not be one."""
    if request.param == "cuda":
        pinned = []

        def empty(size, *, dtype, pin_memory):
            pinned.append(pin_memory)
            return torch.full((size,), 0xAB, dtype=dtype)

        monkeypatch.setattr(
            transfer,
            "torch",
            SimpleNamespace(
                device=lambda name: SimpleNamespace(type="cuda"),
                empty=empty,
                from_numpy=torch.from_numpy,
                uint8=torch.uint8,
            ),
        )
        yield request.param
        assert pinned == [True]
    else:
        yield request.param


def test_arrays_arrive_as_they_were(on):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = transfer.upload(ARRAYS, "cpu")
    assert len(arrived) == len(ARRAYS)
    for one, array in zip(arrived, ARRAYS, strict=True):
        assert one.shape == array.shape
        assert one.dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(one.numpy(), array)
        assert one.data_ptr() % one.element_size() == 0
