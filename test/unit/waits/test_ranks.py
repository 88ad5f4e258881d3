"""Sums over ranks: the same bits on every rank, whatever the library would have done with an all-reduce."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_chunk_cache.kv import ranks


@pytest.mark.parametrize("tp_size", [2, 3, 8])
def test_every_rank_adds_the_same_parts_in_the_same_order(monkeypatch: pytest.MonkeyPatch, tp_size: int) -> None:
    parts = torch.randn(tp_size, 1000, generator=torch.Generator().manual_seed(0)) * 1e4

    def gather(own: torch.Tensor, dim: int) -> torch.Tensor:
        assert (dim, own.shape) == (0, (1, 1000))
        return parts.clone()

    monkeypatch.setattr(ranks, "ranks_of_batch", lambda: SimpleNamespace(all_gather=gather))
    sums = [ranks.sum_over_ranks(part, tp_size) for part in parts]
    assert all(torch.equal(one, sums[0]) for one in sums)
    torch.testing.assert_close(sums[0].double(), parts.double().sum(0), rtol=1e-5, atol=1e-1)


def test_one_rank_asks_nobody() -> None:
    values = torch.ones(3)
    assert ranks.sum_over_ranks(values, 1) is values
