"""Runs: rows of a fused forward that stand side by side, and SGLang's own backend attending from them.

Verbs: `Runs.of` (on the host), `BackendRuns.for_metadata` (a batch as the backend sees it), `attend` (one layer).

To every attention backend a run [a, b) of a request is an extend of its own: the request's slots, a prefix of a tokens,
b - a new ones. A causal mask then shows each row every position up to its own, since K and V of all rows of a layer lie
in the pool before any row attends. So the kernels of stock SGLang serve a fused batch, and serve a plain request, which
is one run, exactly as in stock.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_chunk_cache.forward.whole_rows import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

MAX_KEYS = 1 << 26
"""Keys of all runs together that a backend's tables may name, at 4 or 8 bytes each."""
WORTHWHILE_LEN = 8
"""Mean length of a request's runs from which SGLang's backend is worthwhile: it reads the prefix once per run."""


@dataclass(frozen=True)
class Runs:
    """Maximal runs of consecutive positions, in the order of the rows.

    Attributes:
        pool_rows: `[num_runs]` int64, row of `req_to_token` of each run's request.
        starts, lens: `[num_runs]` int64, first position and number of rows.
    """

    pool_rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lens: npt.NDArray[np.int64]

    @classmethod
    def of(cls, positions: Sequence[npt.NDArray[np.int64]], pool_rows: Sequence[int]) -> Runs:
        """The runs of some requests, given the positions (ascending) and the row of `req_to_token` of each."""
        starts, lens, rows = [], [], []
        for own, row in zip(positions, pool_rows, strict=True):
            begins = np.flatnonzero(np.diff(own, prepend=own[:1] - 2) != 1)
            starts.append(own[begins])
            lens.append(np.diff(begins, append=len(own)))
            rows.append(np.full(len(begins), row, dtype=np.int64))
        none = np.empty(0, dtype=np.int64)
        return cls(*(np.concatenate([none, *of_each]) for of_each in (rows, starts, lens)))

    @classmethod
    def worthwhile(
        cls,
        positions: Sequence[npt.NDArray[np.int64]],
        pool_rows: Sequence[int],
        rows_stay: Sequence[bool],
        min_len: int,
    ) -> tuple[Runs, list[bool]]:
        """Runs of the requests that a backend should serve, and for each request whether it is one of these.

        Args:
            positions, pool_rows: as of `of`.
            rows_stay: for each request, whether none of its rows leaves before the last layer.
            min_len: least mean length of a request's runs, if it has several.
        """
        serves = []
        for own, stays in zip(positions, rows_stay, strict=True):
            num_runs = len(cls.of([own], [0]).lens)
            serves.append(stays and (num_runs <= 1 or len(own) >= min_len * num_runs))
        return cls.of(list(itertools.compress(positions, serves)), list(itertools.compress(pool_rows, serves))), serves

    def fit(self, max_entries: int) -> bool:
        """Whether a backend's tables have room for them; some have buffers of `max_entries`."""
        return len(self.lens) <= max_entries and int((self.starts + self.lens).sum()) <= MAX_KEYS

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What `BackendRuns` needs on the device, for `upload`."""
        ends = self.starts + self.lens
        begins = np.cumsum(self.lens) - self.lens
        return (self.pool_rows, ends, *(one.astype(np.int32) for one in (self.starts, self.lens, begins)))


class BackendRuns:
    """SGLang's backend attending from runs.

    Args:
        runs: of all rows that it serves.
        uploaded: `runs.arrays()`, on the device.
        row_positions: `[num_rows]` int64 of the forward, on the device.
        row_lens: rows of each request of the forward.
        kv_pool: SGLang's.
        forward: the backend's own.
    """

    def __init__(
        self,
        runs: Runs,
        uploaded: Sequence[torch.Tensor],
        row_positions: torch.Tensor,
        row_lens: list[int],
        kv_pool: Any,
        forward: Callable[..., torch.Tensor],
    ) -> None:
        self.row_positions, self.row_lens = row_positions, row_lens
        self._kv_pool = kv_pool
        self._forward = forward
        self._per_run = run_fields(runs, uploaded)

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch:
        """A copy of `batch` with one entry per run."""
        return view_of(batch, self._per_run)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        batch: ForwardBatch,
        save_kv_cache: bool,
        **parts: Any,
    ) -> torch.Tensor:
        """Writes K and V of the rows and attends; `[num_rows, num_q_heads * v_head_dim]`; `parts` go to the backend."""
        if save_kv_cache and k is not None:
            write_rows(self._kv_pool, q, k, v, layer, batch, parts)
        return self._forward(q, k, v, layer, self.for_metadata(batch), save_kv_cache=False, **parts)

    def finish(self) -> None:
        """Does nothing: the backend keeps what it made."""


def view_of(batch: ForwardBatch, fields: Mapping[str, Any]) -> ForwardBatch:
    """A copy of `batch` with other values of some fields."""
    view = copy.copy(batch)
    vars(view).update(fields)
    return view


def run_fields(runs: Runs, uploaded: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Fields of a `ForwardBatch` with one entry per run; `uploaded` as of `BackendRuns`."""
    pool_rows, ends, starts, lens, begins = uploaded
    ends_cpu = torch.from_numpy(runs.starts + runs.lens)
    return {
        "batch_size": len(runs.lens),
        "req_pool_indices": pool_rows,
        "seq_lens": ends,
        "seq_lens_cpu": ends_cpu,
        "seq_lens_sum": int(ends_cpu.sum()),
        "extend_prefix_lens": starts,
        "extend_prefix_lens_cpu": runs.starts.tolist(),
        "extend_seq_lens": lens,
        "extend_seq_lens_cpu": runs.lens.tolist(),
        "extend_start_loc": begins,
        "extend_num_tokens": int(runs.lens.sum()),
    }


@dataclass(frozen=True)
class StockServedRequests:
    """Requests that SGLang's backend serves by runs, in a forward in which a kernel of ours serves others.

    Attributes:
        are_served: for each request of the batch, whether it is one of them; none of their rows leaves.
        runs: of their rows.
        slots: of their rows, on the device.
    """

    are_served: Sequence[bool]
    runs: BackendRuns
    slots: torch.Tensor
