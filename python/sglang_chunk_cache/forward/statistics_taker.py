"""StatisticsTaker: statistics of chunks, taken in the forward that computes their KV.

Verbs: `plan` (which chunks of a batch are computed in this forward), `observe` (one layer), `finish` (sums of all ranks
go to the requests).

Promises: the forward's result is untouched. Only rows of chunks that will be remembered are looked at, at the layers
that `statistics_layers` names, with a few of the model's query heads: attention weights that are written out cost
several times as much as a kernel that does not store them, and a few heads tell nearly what all do (docs/variants.md
has the numbers). A token whose KV was found and not computed has no statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from chunk_cache.index.system_prompt import piece_starts
from chunk_cache.types import Span
from sgl_kernel_ext.attention_mass import attention_mass
from sgl_kernel_ext.backend import resolve_backend
from sgl_kernel_ext.transfer import Download, upload
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.row_choice import chunk_of, keep_where
from sglang_chunk_cache.kv.chunk_sums import ChunkSums
from sglang_chunk_cache.kv.layer_kv import LayerKV
from sglang_chunk_cache.kv.ranks import ranks_of_batch, sum_over_ranks
from sglang_chunk_cache.request.chunk_request import ChunkRequest, state_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import ScheduleBatch


MAX_HEADS, NUM_HEADS = 4, 2
"""Query heads that are looked at: all of a model that has no more than `MAX_HEADS`, else `NUM_HEADS`, evenly spread."""


def observed_heads(num_heads: int) -> list[int]:
    """Which query heads of a model are looked at, ascending."""
    count = num_heads if num_heads <= MAX_HEADS else NUM_HEADS
    return [i * num_heads // count for i in range(count)]


@dataclass(frozen=True)
class _Job:
    """Rows [begin, end) of one chunk, computed in this forward by request `request` of the batch."""

    spans: Sequence[Span]
    sums: ChunkSums
    request: int
    chunk: int
    begin: int
    end: int
    slots: torch.Tensor
    """`[end]` int64, the slots of all positions up to the end of the rows."""

    @property
    def span(self) -> tuple[int, int]:
        return self.spans[self.chunk]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Lengths of its sums: per row outside, per key received, two per earlier chunk, per piece of S."""
        return self.end - self.begin, self.end - self.span[0], 2 * self.chunk, len(self.pieces)

    @property
    def pieces(self) -> list[int]:
        """Where the pieces of the system prompt begin."""
        return piece_starts(self.spans[0][0])

    @property
    def segment_starts(self) -> list[int]:
        """Where segments of keys begin: pieces of S, then by turns a chunk and the text behind it, then this chunk."""
        earlier = [bound for span in self.spans[: self.chunk] for bound in span]
        return [*self.pieces, *earlier, self.span[0]]


def _grouped(jobs: Sequence[_Job], implementation: str) -> list[list[_Job]]:
    """Jobs in groups of one call each. In torch a group is a request, as many small operations are slow; else a job."""
    if implementation != "torch":
        return [[job] for job in jobs]
    return [list(group) for _, group in itertools.groupby(jobs, lambda job: job.request)]


class _Rows(NamedTuple):
    """Rows of a batch for one call, `[n]` int64 on the device."""

    index: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None
    """Where the chunk of each row begins; None if there is one job."""


def _rows_of(jobs: Sequence[_Job], positions: torch.Tensor, row_lens: Sequence[int]) -> _Rows:
    """The rows of the jobs, all of one request, in order."""
    first = sum(row_lens[: jobs[0].request])
    own = positions[first : first + row_lens[jobs[0].request]]
    num_rows = sum(job.end - job.begin for job in jobs)
    if len(jobs) == 1:
        index, starts = keep_where((own >= jobs[0].begin) & (own < jobs[0].end), num_rows), None
    else:
        bounds = zip(*((job.begin, job.end, job.span[0]) for job in jobs), strict=True)
        begins, ends, chunk_starts = upload([np.array(one, dtype=np.int64) for one in bounds], own.device)
        which = chunk_of(own, begins, ends)
        index = keep_where(which >= 0, num_rows)
        starts = chunk_starts[which[index]]
    return _Rows(index + first, own[index], starts)


class StatisticsTaker:
    def __init__(self, jobs: list[_Job], layers: Sequence[int], kv_pool: Any, kernel: str = "auto") -> None:
        self._jobs = jobs
        self._kernel = kernel
        self._groups = _grouped(jobs, resolve_backend(kernel, torch.device(kv_pool.device), "attention_mass"))
        self._layers = frozenset(layers)
        self._kv_pool = kv_pool
        group = ranks_of_batch()
        self._tp_size, self._tp_rank = group.world_size, group.rank_in_group
        self._num_observed = 1
        self._heads: tuple[torch.Tensor, torch.Tensor] | None = None
        self._row_lens: list[int] = []
        self._rows: list[_Rows] = []  # of each group, as long as the rows are the same
        self._total = torch.zeros(sum(sum(job.sizes) for job in jobs), device=kv_pool.device)
        self._sums = torch.split(self._total, [sum(job.sizes) for job in jobs])  # views
        self._is_observed = False

    @classmethod
    def plan(
        cls, batch: ScheduleBatch, layers: Sequence[int], kv_pool: Any, kernel: str, computed: Sequence[tuple[int, int]]
    ) -> StatisticsTaker | None:
        """The taker for a forward of `batch`; None if no chunk that will be remembered is computed in it.

        Args:
            computed: per request, the range of positions in which this forward computes all that is not reused.
        """
        if not layers:
            return None
        pool_indices = batch.req_pool_indices_cpu.tolist()
        req_to_token = batch.req_to_token_pool.req_to_token
        jobs: list[_Job] = []
        for i, req in enumerate(batch.reqs):
            state = state_of(req)
            if state is None:
                continue
            ranges = computed_ranges(state, *computed[i])
            if not ranges:
                continue
            spans = state.options.spans
            sums = state.sums = state.sums or ChunkSums(spans, len(layers))
            slots = req_to_token[pool_indices[i], : max(end for _, _, end in ranges)].to(torch.int64)
            jobs += [_Job(spans, sums, i, chunk, first, end, slots[:end]) for chunk, first, end in ranges]
        return cls(jobs, layers, kv_pool, kernel) if jobs else None

    def observes(self, layer_id: int) -> bool:
        """Whether statistics are taken at this layer."""
        return layer_id in self._layers

    def observe(self, seen: ObservedRows) -> None:
        """Adds one layer."""
        self._is_observed = True
        layer, sinks = seen.layer, seen.sinks
        heads, kv_heads = self._own_heads(layer)
        if not len(heads):
            return
        if self._row_lens != list(seen.row_lens):  # when rows leave, their number changes
            self._row_lens = list(seen.row_lens)
            self._rows = [_rows_of(jobs, seen.positions, seen.row_lens) for jobs in self._groups]
        q = seen.q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[:, heads]
        stored = LayerKV.of(self._kv_pool, layer)
        sums = iter(self._sums)
        for jobs, rows in zip(self._groups, self._rows, strict=True):
            last = jobs[-1]
            received, by_segment = attention_mass(
                q[rows.index],
                stored.k[last.slots[:, None], kv_heads],
                rows.positions,
                sm_scale=layer.scaling,
                logit_cap=layer.logit_cap,
                k_scale=stored.k_scale,
                segment_starts=last.segment_starts,
                skip_self=True,
                row_starts=rows.starts,
                sinks=None if sinks is None else sinks[heads],
                backend=self._kernel,
            )
            assert by_segment is not None
            by_job = by_segment.split([job.end - job.begin for job in jobs])
            for job, given in zip(jobs, by_job, strict=True):
                first = len(job.pieces)
                on_system, on_context = given[:, :first], given[:, first : first + 2 * job.chunk]
                outside = (on_context if job.chunk else on_system).sum(1)
                own_received = received[job.span[0] : job.end]
                found = torch.cat([outside, own_received, on_context.sum(0), on_system.sum(0)])
                next(sums).add_(found, alpha=len(heads))

    def _own_heads(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads that this rank looks at, counted from its first, and the key head of each; alike in all layers."""
        if self._heads is None:
            first = layer.tp_q_head_num * self._tp_rank
            observed = observed_heads(layer.tp_q_head_num * self._tp_size)
            heads = [h - first for h in observed if 0 <= h - first < layer.tp_q_head_num]
            group = layer.tp_q_head_num // layer.tp_k_head_num
            both = np.array([heads, [h // group for h in heads]], dtype=np.int64)
            q_heads, kv_heads = upload([both], self._kv_pool.device)[0]
            self._num_observed, self._heads = len(observed), (q_heads, kv_heads)
        return self._heads

    def finish(self) -> None:
        """Hands the sums to the requests, averaged over the observed heads of all ranks."""
        if not self._is_observed:
            return  # the forward did not run the layers (it was replayed from a graph)
        sums = Download(sum_over_ranks(self._total / self._num_observed, self._tp_size))
        begins = itertools.accumulate((sum(job.sizes) for job in self._jobs), initial=0)
        for job, at in zip(self._jobs, begins, strict=False):
            job.sums.add(job.chunk, job.begin, job.end, sums, at)


def computed_ranges(state: ChunkRequest, begin: int, end: int) -> list[tuple[int, int, int]]:
    """(chunk, first position, end) of what a forward over [begin, end) computes of the chunks to remember.

    For a fused request these are chunks that it does not reuse; those within its load are rows in front of the extend.
    """
    if state.prompt.unsupported or not state.options.remembers or not state.prompt.keys:
        return []
    ranges, plan = [], state.admission.fused_plan
    for chunk, span in enumerate(state.options.spans):
        if plan is not None and not plan.chunks[chunk].is_to_remember:
            continue
        first, last = max(span[0], begin), min(span[1], end)
        if first < last:
            ranges.append((chunk, first, last))
    return ranges
