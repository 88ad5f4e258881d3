"""Agreement among the ranks that compute one batch together, each with some of the heads.

Verbs: `ranks_of_batch` (which they are), `max_over_ranks`, `sum_over_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.dp_attention import get_dp_tp_group

Votes: TypeAlias = npt.NDArray[np.int64]
ReduceMax: TypeAlias = Callable[[Votes], Votes]
"""The element-wise maximum of votes over the tensor-parallel ranks."""


def ranks_of_batch() -> GroupCoordinator:
    """The tensor-parallel ranks; with data-parallel attention, those of one replica."""
    return get_dp_tp_group()


def of_one_rank(votes: Votes) -> Votes:
    """The `ReduceMax` of a server with one rank."""
    return votes


def max_over_ranks(group: torch.distributed.ProcessGroup) -> ReduceMax:
    """The element-wise maximum of votes over the ranks of a group on the CPU."""

    def reduce(votes: Votes) -> Votes:
        tensor = torch.from_numpy(votes)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
        return votes

    return reduce


def sum_over_ranks(values: torch.Tensor, tp_size: int) -> torch.Tensor:
    """`values` summed over the tensor-parallel ranks, bit for bit the same on each, so that all choose alike.

    Every rank gathers the parts themselves and adds them in the same order. An all-reduce may add in another order on
    each rank: no library promises otherwise.
    """
    return values if tp_size == 1 else ranks_of_batch().all_gather(values[None], dim=0).sum(0)
