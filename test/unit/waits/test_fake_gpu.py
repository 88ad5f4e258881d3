"""The fake GPU notes what waits on a real one, and only that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sgl_kernel_ext.transfer import Download, upload
from unit.waits.fake_gpu import FakeGpu

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool((t > 0).all()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "assignment by a mask": lambda t: t.__setitem__(t > 0, t),
    "assignment of a number": lambda t: t.__setitem__(torch.zeros_like(t), 7),
    "a list": lambda t: torch.tensor([1, 2], device=t.device),
    "a list as index": lambda t: t[[1, 2]],
    "a tensor of the host as index": lambda t: t[torch.tensor([1, 2])],
    "pageable": lambda t: torch.tensor([1, 2]).to(t.device, non_blocking=True),
    "pageable copy_": lambda t: t.copy_(torch.ones(4), non_blocking=True),
    "pageable target": lambda t: torch.empty(4).copy_(t, non_blocking=True),
    "blocking": lambda t: torch.empty(4, pin_memory=True).to(t.device),
    "repeat_interleave": lambda t: t.repeat_interleave(t),
    "event": lambda t: torch.cuda.Event().synchronize(),
}
RUNS_ON: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda t: (t + 1).sum().clamp(max=3) * 2.5,
    "gather": lambda t: t[torch.zeros_like(t)],
    "views": lambda t: t[1:].view(1, 3).split([1, 2], dim=1),
    "upload": lambda t: upload([np.arange(3), np.zeros((2, 2), np.float32)], t.device),
    "download": lambda t: Download(t),
    "to host": lambda t: t.to("cpu", non_blocking=True),
    "pinned": lambda t: torch.empty(4, pin_memory=True).to(t.device, non_blocking=True),
    "output_size": lambda t: t.repeat_interleave(t, output_size=9),
    "fill": lambda t: t.index_fill_(0, torch.zeros_like(t), 7),
    "a number in where": lambda t: torch.where(t > 0, t, -1),
    "sort": lambda t: torch.sort(t, stable=True).indices,
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_noted(name: str) -> None:
    with FakeGpu.there() as gpu:
        tensor = torch.zeros(4, dtype=torch.int64, device="cuda")
        with gpu.watching() as watch:
            try:
                WAITS[name](tensor)
            except RuntimeError:
                assert watch.waits, "only what waits may have no result"
    assert watch.waits


@pytest.mark.parametrize("name", RUNS_ON)
def test_what_does_not_wait_is_not(name: str) -> None:
    with FakeGpu.there() as gpu:
        tensor = torch.zeros(4, dtype=torch.int64, device="cuda")
        with gpu.watching() as watch:
            RUNS_ON[name](tensor)
    assert watch.operations
    assert not watch.waits


def test_a_download_is_there_once_the_gpu_has_caught_up() -> None:
    with FakeGpu.there() as gpu:
        download = Download(torch.zeros(4, device="cuda"))
        assert not download.is_there
        gpu.catch_up()
        assert download.is_there
        with gpu.watching() as watch:
            assert download.read().tolist() == [1.0] * 4
        assert not watch.waits
        later = Download(torch.zeros(4, device="cuda"))
        with gpu.watching() as watch:
            later.read()
    assert [call.name for call in watch.waits] == ["Event.synchronize"]
