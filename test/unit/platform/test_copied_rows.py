"""Operations of data-parallel attention in plain torch."""

from __future__ import annotations

import torch

from sglang_plain_cpu.operations import copy_rows


def test_rows_go_into_what_all_ranks_compute_and_come_back() -> None:
    own = torch.arange(8.0).view(4, 2)  # the last row is padding
    together = torch.zeros(7, 2)
    offset, count = torch.tensor(2), torch.tensor(3)
    copy_rows(together, own, 0, offset, count, False)
    assert torch.equal(together[2:5], own[:3])
    assert not together[:2].any()
    assert not together[5:].any()
    back = torch.zeros(4, 2)
    copy_rows(back, together, 0, offset, count, True)
    assert torch.equal(back[:3], own[:3])
    assert not back[3:].any()


def test_a_rank_without_rows_copies_none() -> None:
    together = torch.ones(2, 2)
    copy_rows(together, torch.empty(0, 2), 0, torch.tensor(2), torch.tensor(0), False)
    assert together.all()
