"""Requests without a row in a batch of a model with states: requests that decode beside may leave a prompt no token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_chunk_cache.forward.added_rows import NO_ROWS, NOTHING_ADDED, AddedRows
from sglang_chunk_cache.forward.batch import state_rows


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_request_without_rows_takes_no_part(monkeypatch: pytest.MonkeyPatch, at: int, is_fused: bool) -> None:
    monkeypatch.setattr(state_rows, "state_of", lambda req: None)
    positions = [np.arange(30, 34), np.arange(8, 9)]
    load: Any = SimpleNamespace(plan=SimpleNamespace(chunks=()), transitions={})
    added = [AddedRows(NO_ROWS, 30, load) if is_fused else NOTHING_ADDED, NOTHING_ADDED]
    positions.insert(at, NO_ROWS)
    added.insert(at, NOTHING_ADDED)
    batch: Any = SimpleNamespace(
        req_pool_indices_cpu=torch.arange(3), reqs=[None] * 3, prefix_lens=[30, 30, 8], device="cpu"
    )
    unused: Any = None
    found = state_rows.state_forward(unused, unused, unused, batch, added, positions)
    assert (found is not None) == is_fused
    if found is not None:
        assert found._is_stock
