"""Problems shared by the kernel tests: poisoned pools, scattered slots, hard row sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Problem:
    """Arguments of `sparse_extend`; slots no row can see hold NaN, and so does `out` before the call."""

    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    kv_indptr: list[int]
    kv_indices: torch.Tensor
    row_indptr: list[int]
    row_positions: torch.Tensor
    out: torch.Tensor

    @property
    def inputs(self) -> tuple:
        return (
            self.q,
            self.k_buffer,
            self.v_buffer,
            self.kv_indptr,
            self.kv_indices,
            self.row_indptr,
            self.row_positions,
        )


def _bounds(lens: Sequence[int]) -> list[int]:
    bounds = [0]
    for length in lens:
        bounds.append(bounds[-1] + length)
    return bounds


def build_problem(
    requests: Sequence[tuple[int, Sequence[int]]],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    contiguous: bool = False,
    run_len: int = 0,
    seed: int = 0,
) -> Problem:
    """`requests` are (kv_len, row positions). Rows past the last visible key of a request stay NaN in the pool.

    Slots are in random order, `contiguous`, or in runs of `run_len` that are in random order.
    """
    rng = torch.Generator().manual_seed(seed)
    kv_lens, rows = [kv_len for kv_len, _ in requests], [list(positions) for _, positions in requests]
    kv_indptr, row_indptr = _bounds(kv_lens), _bounds([len(r) for r in rows])
    num_slots = kv_indptr[-1] + 7
    order = torch.arange(num_slots) if contiguous else torch.randperm(num_slots, generator=rng)
    if run_len:
        order = torch.cat(
            [torch.arange(num_slots).split(run_len)[i] for i in torch.randperm(-(-num_slots // run_len), generator=rng)]
        )
    kv_indices = order[: kv_indptr[-1]]
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    k_buffer = torch.full((num_slots, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    v_buffer = torch.full((num_slots, num_kv_heads, v_head_dim), float("nan"), dtype=dtype)
    for i, positions in enumerate(rows):
        seen = kv_indices[kv_indptr[i] : kv_indptr[i] + (positions[-1] + 1 if positions else 0)]
        k_buffer[seen] = torch.randn(len(seen), num_kv_heads, head_dim, generator=rng).to(dtype)
        v_buffer[seen] = torch.randn(len(seen), num_kv_heads, v_head_dim, generator=rng).to(dtype)
    num_rows = row_indptr[-1]
    return Problem(
        q=torch.randn(num_rows, num_q_heads, head_dim, generator=rng).to(dtype),
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        row_indptr=row_indptr,
        row_positions=torch.tensor([p for r in rows for p in r], dtype=torch.int64),
        out=torch.full((num_rows, num_q_heads, v_head_dim), float("nan"), dtype=dtype),
    )


def attend_with_sinks(problem: Problem, sinks: torch.Tensor, window: int = -1) -> torch.Tensor:
    """[num_rows, num_q_heads, v_head_dim] fp64 with scores q.k / 4, weight by weight: exp(score) over the sum of all
    that the row sees and exp(sink)."""
    out = torch.zeros(problem.out.shape, dtype=torch.float64)
    group = problem.q.shape[1] // problem.k_buffer.shape[1]
    for i, (begin, end) in enumerate(itertools.pairwise(problem.row_indptr)):
        slots = problem.kv_indices[problem.kv_indptr[i] :]
        for row in range(begin, end):
            position = int(problem.row_positions[row])
            seen = slots[max(0, position - window) if window >= 0 else 0 : position + 1]
            for head, sink in enumerate(sinks.double().tolist()):
                k, v = (one[seen, head // group].double() for one in (problem.k_buffer, problem.v_buffer))
                shares = (k @ problem.q[row, head].double() / 4).exp()
                out[row, head] = shares @ v / (shares.sum() + math.exp(sink))
    return out


@pytest.fixture(scope="session")
def with_sinks() -> Callable[..., torch.Tensor]:
    return attend_with_sinks


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return build_problem


@pytest.fixture(scope="session")
def hard_requests() -> list[tuple[int, list[int]]]:
    """One key; one row; odd lengths; no row at all; first and last position; dense after scattered rows."""
    return [
        (1, [0]),
        (33, [32]),
        (17, []),
        (67, [0, 1, 5, 31, 32, 33, 64, 66]),
        (129, [3, *range(60, 101)]),
        (40, list(range(40))),
    ]
