"""Rounds of runs: in which order a `StateForward` computes the rows of a batch, and what it takes of them.

Verbs: `runs_of` (a request's rows), `round_of` (runs that are computed together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chunk_cache.index.transition_store import ChunkTransitions
from sgl_kernel_ext.transfer import upload_groups
from sglang_chunk_cache.forward.runs import Runs, run_fields
from sglang_chunk_cache.kv.transition import LayerTransition, Transition

MOST_TAKEN = 16
"""Chunks whose transitions are taken at once; bounds the memory that their states need meanwhile."""
TRACKING = (
    "mamba_track_indices",
    "mamba_track_mask",
    "mamba_track_seqlens",
    "mamba_prefill_track_mask_cpu",
    "mamba_track_seqlens_cpu",
)
"""Fields of a batch by which SGLang keeps states for its tree; used for requests whose states are exact."""


@dataclass(frozen=True)
class Gap:
    """Reused tokens in front of a row: `end` is the position of the row."""

    end: int
    transition: Transition


@dataclass(frozen=True)
class Wanted:
    """A chunk that is computed in a forward and will be remembered, or a part of it.

    Attributes:
        chunk: its place in the prompt.
        begin, end: positions of the part.
        seam_end: position from which on the transition is wanted.
        known: gets the transition.
    """

    chunk: int
    begin: int
    end: int
    seam_end: int
    known: ChunkTransitions[Transition]


@dataclass(frozen=True)
class RequestRows:
    """Rows of one request in a forward.

    Attributes:
        pool_row: its row of `req_to_token`.
        positions: `[num_rows]` int64, ascending.
        begin: position up to which its states are known.
        gaps: in front of rows.
        wanted: chunks, each within one run.
    """

    pool_row: int
    positions: npt.NDArray[np.int64]
    begin: int
    gaps: Sequence[Gap] = ()
    wanted: Sequence[Wanted] = ()


@dataclass(frozen=True)
class Run:
    """Rows [first, first + length) of the forward, whose positions begin at `start`."""

    request: RequestRows
    first: int
    start: int
    length: int
    gap: Gap | None


@dataclass(frozen=True)
class Taking:
    """Rows [begin, end) of a round, which are a part of a chunk, and their transitions so far, by layer."""

    wanted: Wanted
    begin: int
    end: int
    layers: list[LayerTransition] = field(default_factory=list)

    @property
    def rule_begin(self) -> int:
        """The first row behind the seam."""
        return min(self.end, self.begin + max(0, self.wanted.seam_end - self.wanted.begin))


@dataclass
class Chain:
    """Runs of requests with gaps, in steps: first the first run of each request, then the second ones, and so on.

    Attributes:
        step_lens: runs of each step; a step is never longer than the one before.
        rows: of those runs whose request has a next run here, on the device.
        borders: where each of these runs begins among `rows`, and where the last ends, on the device.
        next_runs: the next run of each of these runs, on the device.
        last_runs: the last run of each request, in the order of the first step, on the device.
        gaps: in front of runs, with the place of the run.
        gap_runs: for each part of a transition, the runs behind gaps that have this part, on the device.
        slots: of the requests in the pools.
    """

    step_lens: Sequence[int]
    rows: torch.Tensor
    borders: torch.Tensor
    next_runs: torch.Tensor
    last_runs: torch.Tensor
    gaps: Sequence[tuple[int, Gap]]
    gap_runs: Sequence[torch.Tensor]
    slots: torch.Tensor | None = None


@dataclass
class Round:
    """Runs that are computed together.

    Attributes:
        takings: of its rows.
        rule_groups: for groups of at most `MOST_TAKEN` takings, the rows behind their seams, and the borders of these
            sequences among them, on the device.
        rows: `[n]` int64 of the forward, on the device; None = all, as SGLang does.
        fields: of the batch as SGLang's backend sees it.
        chain: None = the states of each run lie in the pools.
        metadata: of the backend, once it has made them.
    """

    takings: list[Taking]
    rule_groups: list[list[torch.Tensor]]
    rows: torch.Tensor | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    chain: Chain | None = None
    metadata: Any = None


def runs_of(request: RequestRows, first: int) -> list[Run]:
    runs = Runs.of([request.positions], [request.pool_row])
    gaps, known, found = {gap.end: gap for gap in request.gaps}, request.begin, []
    for start, length in zip(runs.starts.tolist(), runs.lens.tolist(), strict=True):
        found.append(Run(request, first, start, length, gaps[start] if start > known else None))
        first, known = first + length, start + length
    return found


def round_of(
    own: Sequence[Run], device: Any, step_lens: Sequence[int] | None = None, *, is_stock: bool = False
) -> Round:
    """Some runs as a round; with `step_lens`, the runs are a chain (see `Chain`)."""
    takings, first = [], 0
    for run in own:
        for wanted in run.request.wanted:
            if run.start <= wanted.begin and wanted.end <= run.start + run.length:
                at = first - run.start
                takings.append(Taking(wanted, at + wanted.begin, at + wanted.end))
        first += run.length
    ranges = [(taking.rule_begin, taking.end) for taking in takings if taking.rule_begin < taking.end]
    rules = [
        [np.concatenate([np.arange(*one) for one in group]), _borders([end - begin for begin, end in group])]
        for group in (ranges[i : i + MOST_TAKEN] for i in range(0, len(ranges), MOST_TAKEN))
    ]
    if is_stock:
        return Round(takings, upload_groups(rules, device))
    runs = Runs(
        np.array([run.request.pool_row for run in own]),
        np.array([run.start for run in own]),
        np.array([run.length for run in own]),
    )
    rows = np.concatenate([np.arange(run.first, run.first + run.length) for run in own])
    gaps = [] if step_lens is None else [(i, run.gap) for i, run in enumerate(own) if run.gap is not None]
    num_parts = max((gap.transition.num_rules for _, gap in gaps), default=0)
    gap_runs = [np.array([i for i, gap in gaps if gap.transition.num_rules > part]) for part in range(num_parts)]
    chained = [] if step_lens is None else _chain_arrays([run.length for run in own], step_lens)
    groups = [*rules, [rows], chained, gap_runs, runs.arrays()]
    *rule_groups, (own_rows,), of_chain, of_gaps, per_run = upload_groups(groups, device)
    chain = None
    if step_lens is not None:
        chain_rows, borders, next_runs, last_runs = of_chain
        chain = Chain(step_lens, chain_rows, borders, next_runs, last_runs, gaps, of_gaps)
    return Round(takings, rule_groups, own_rows, run_fields(runs, per_run) | dict.fromkeys(TRACKING), chain)


def _borders(lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Where sequences of these lengths begin, and where the last ends."""
    return np.cumsum([0, *lens]).astype(np.int32)


def _chain_arrays(lens: Sequence[int], step_lens: Sequence[int]) -> list[npt.NDArray[Any]]:
    """`rows`, `borders`, `next_runs` and `last_runs` of a chain of runs of these lengths."""
    firsts, begins = np.cumsum([0, *step_lens]), np.cumsum([0, *lens])
    next_of = {firsts[k] + i: firsts[k + 1] + i for k, num in enumerate(step_lens[1:]) for i in range(num)}
    last_runs = [max(firsts[k] + i for k, num in enumerate(step_lens) if i < num) for i in range(step_lens[0])]
    rows = [np.arange(begins[run], begins[run + 1]) for run in next_of]
    none = np.empty(0, dtype=np.int64)
    next_runs = np.array([*next_of.values()], dtype=np.int32)
    return [np.concatenate([none, *rows]), _borders([*map(len, rows)]), next_runs, np.array(last_runs)]
