"""Tensors that the scheduler's stream has made are held until the stream of the forward has read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_chunk_cache.kv import partial_load
from sglang_chunk_cache.kv.assembler import hold
from sglang_chunk_cache.kv.partial_load import LayerCopy, LayerLoads, PartialLoad


def test_tensors_of_a_gpu_are_held_for_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(current_stream=lambda: "forward"))
    held: list[tuple[str, str]] = []

    def tensor(name: str, device: str) -> Any:
        return SimpleNamespace(
            device=SimpleNamespace(type=device), record_stream=lambda stream: held.append((name, stream))
        )

    hold([tensor("a", "cuda"), tensor("b", "cpu"), tensor("c", "cuda")])
    assert held == [("a", "forward"), ("c", "forward")]


def test_slots_of_layerwise_loads_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    monkeypatch.setattr(partial_load, "hold", held.extend)
    unused: Any = None
    partial = PartialLoad(unused, torch.arange(4), unused, unused)
    copies = [LayerCopy(partial, torch.arange(n), torch.arange(n), n) for n in (1, 2)]
    LayerLoads(unused, unused, copies)
    expected = {id(one) for copy in copies for one in (copy.source, copy.target)} | {id(partial.slots)}
    assert {id(one) for one in held} == expected
