"""FusedBatch: a batch with added rows as one model computes it: in several parts if the rows are too many for one, or
not all known.

Verb: `FusedBatch.parts`. A row depends on rows in front of it only, so rows that are known before the forward may be
cut anywhere. They can be too many if KV did not arrive during a forward, or for a model that drafts. Rows of a request
that chooses are not cut. If a question finds rows, it is a part of its own in front of the one that computes the
answer.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from sglang_chunk_cache.flags.step_limits import step_len
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.attending import Observer
from sglang_chunk_cache.forward.batch.choices import Choices
from sglang_chunk_cache.forward.batch.row_arrays import one_ahead, positions_of, questions_alone, with_rows
from sglang_chunk_cache.forward.forward import Part
from sglang_chunk_cache.forward.positions import stand_at
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.runs import BackendRuns, Runs, StockServedRequests
from sglang_chunk_cache.forward.selection.question_pass import QuestionPass
from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.kv.layer_kv import is_latent
from sglang_chunk_cache.kv.model_layers import ModelLayers

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


Observe = Callable[["ScheduleBatch", Sequence[int], Sequence[int] | None], tuple[Observer, ...]]
"""Who looks on in a batch, given where each request's rows begin and end; None = they end where its extend does."""
States = Callable[["ScheduleBatch", Sequence[AddedRows], Sequence[npt.NDArray[np.int64]]], "StateForward | None"]
"""What layers with states do in a batch, given what is added to it and the positions of all rows."""


@dataclass(frozen=True)
class FusedBatch:
    """See the head of this file.

    Attributes:
        batch: SGLang's, without the rows.
        model_runner: of the model that computes it.
        init: makes a `ForwardBatch` of a batch, as stock SGLang does.
        kernel: backend of the operations.
        min_run_len: mean length of runs of rows from which SGLang's attention backend serves them; None = never.
        layers: of the model; None = it drafts, so that no row leaves and each gets the token behind it as its input.
        observe: see `Observe`.
        states: see `States`; None = the model has none.
        count: called with the name of the kernel that serves a part.
    """

    batch: ScheduleBatch
    model_runner: ModelRunner
    init: Callable[[ScheduleBatch], ForwardBatch]
    kernel: str
    min_run_len: int | None
    layers: ModelLayers | None = None
    observe: Observe = lambda *_: ()
    states: States | None = None
    count: Callable[[str], None] = lambda _: None

    def parts(self, added: Sequence[AddedRows]) -> tuple[Part, ...]:
        """One part, or several: see the head of this file; `added` has one entry per request."""
        ahead, left = self._ahead(added)
        first = ahead[0] if ahead else None
        if self.layers is not None and any(one.choice is not None for one in added):
            return (*ahead, *self._choosing(left, self.layers, first))
        return (*ahead, self._part(self.batch, left, first=first))

    def _ahead(self, added: Sequence[AddedRows]) -> tuple[list[Part], Sequence[AddedRows]]:
        """Parts of known rows for which the last part has no room, one request after the other; what is left for it."""
        batch, most = self.batch, step_len()
        num_rows = sum(len(one.positions) for one in added) + sum(batch.extend_lens)
        ends = np.cumsum([0 if one.choice is not None else len(one.positions) for one in added])
        num_ahead = 0 if most is None else min(num_rows - most, int(ends[-1]))
        if most is None or num_ahead <= 0:
            return [], added
        without_tails = copy.copy(batch)
        without_tails.prefix_lens = [p + n for p, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        without_tails.extend_lens = without_tails.extend_logprob_start_lens = [0] * len(added)
        without_tails.return_logprob = False
        without_tails.replace_embeds = without_tails.replace_positions = None
        lens = np.diff(ends, prepend=0)
        # Of each request, how many rows are in front of each cut.
        cuts = [np.clip(cut - (ends - lens), 0, lens).tolist() for cut in (*range(0, num_ahead, most), num_ahead)]
        parts: list[Part] = []
        for begins, stops in itertools.pairwise(cuts):
            own = [_rows(*one) for one in zip(added, begins, stops, strict=True)]
            parts.append(self._part(without_tails, own, is_ahead=True, first=parts[0] if parts else None))
        return parts, [_rows(one, begin) for one, begin in zip(added, cuts[-1], strict=True)]

    def _choosing(self, added: Sequence[AddedRows], layers: ModelLayers, first: Part | None) -> tuple[Part, ...]:
        """The part that computes the answers, behind the parts in which questions ask, one for each last layer;
        `first` as of `_part`."""
        answer = self._part(self.batch, added, first=first)
        rows = answer.attention
        assert isinstance(rows, FusedRows), "rows that are chosen are served by our kernel"
        choices = Choices.of(self.batch, added, rows, self.model_runner, layers)
        asking: dict[int | None, list[int]] = {}
        for i, one in enumerate(added):
            if (choice := one.choice) is not None and choice.selection.asks_first:
                asking.setdefault(choice.selection.last_asked_layer, []).append(i)
        if not asking:
            return (replace(answer, attention=choices.attention(rows)),)
        quiet = replace(self, observe=lambda *_: (), count=lambda _: None)
        parts: list[Part] = []
        for last_layer, members in asking.items():
            question = quiet._part(*questions_alone(self.batch, added, members), first=answer)
            assert question.attention is not None
            observer = QuestionPass(choices.requests, members, question.attention.row_lens, rows, choices.tp_size)
            parts.append(replace(question, is_question=True, last_layer=last_layer, observers=(observer,)))
        return (*parts, replace(answer, choose=partial(choices.choose, answer.batch)))

    def _part(
        self, batch: ScheduleBatch, added: Sequence[AddedRows], *, is_ahead: bool = False, first: Part | None = None
    ) -> Part:
        """One part; `is_ahead`: it ends with the added rows; `first`: a part made before, whose tables are shared."""
        begins = [
            prefix_len if one.begin is None else one.begin
            for one, prefix_len in zip(added, batch.prefix_lens, strict=True)
        ]
        positions = positions_of(batch, added)
        ends = None
        if is_ahead:
            ends = [int(own[-1]) + 1 if len(own) else begin for own, begin in zip(positions, begins, strict=True)]
        observers = self.observe(batch, begins, ends)
        rows_stay = [one.choice is None or not len(own) for one, own in zip(added, positions, strict=True)]
        pool_rows = batch.req_pool_indices_cpu.tolist()
        runs, are_served = self._runs_for_backend(positions, pool_rows, rows_stay)
        extra = () if runs is None else runs.arrays()
        fused_batch, row_positions, uploaded = with_rows(batch, added, positions, extra, self.model_runner.device)
        if self.layers is None:
            fused_batch.input_ids = one_ahead(batch, fused_batch, positions)
        states = None if self.states is None else self.states(batch, added, positions)
        forward_batch = self.init(fused_batch)
        stand_at(forward_batch, row_positions)
        kv_pool, row_lens = self.model_runner.token_to_kv_pool, fused_batch.extend_lens
        beside = None
        if runs is not None:
            self.count("sglang")
            stock_forward = self.model_runner.attn_backend.forward
            by_runs = BackendRuns(runs, uploaded, row_positions, row_lens, kv_pool, stock_forward)
            if all(are_served):
                return Part(forward_batch, by_runs, observers, states)
            slots = torch.cat([*itertools.compress(fused_batch.out_cache_loc.split(row_lens), are_served)])
            beside = StockServedRequests(are_served, by_runs, slots)
        self.count(self.kernel)
        if first is not None and isinstance(first.attention, FusedRows):
            rows = replace(first.attention, row_positions=row_positions, row_lens=row_lens, beside=beside)
        else:
            rows = FusedRows.build(
                req_to_token=self.model_runner.req_to_token_pool.req_to_token,
                req_pool_indices=pool_rows,
                kv_lens=batch.seq_lens_cpu.tolist(),
                row_lens=row_lens,
                row_positions=row_positions,
                kv_pool=kv_pool,
                kernel=self.kernel,
                beside=beside,
            )
        return Part(forward_batch, rows, observers, states)

    def _runs_for_backend(
        self, positions: list[npt.NDArray[np.int64]], pool_rows: list[int], rows_stay: list[bool]
    ) -> tuple[Runs | None, list[bool]]:
        """Runs of a part that SGLang's backend serves (None: it serves none), and which requests it serves."""
        if self.min_run_len is not None:
            runs, are_served = Runs.worthwhile(positions, pool_rows, rows_stay, self.min_run_len)
            # Beside our kernel Q of latent attention comes in one piece, which not every backend takes.
            is_possible = all(are_served) or (any(are_served) and not is_latent(self.model_runner.token_to_kv_pool))
            if is_possible and len(runs.lens) and runs.fit(self.model_runner.req_to_token_pool.size):
                return runs, are_served
        return None, [False for _ in positions]


def _rows(one: AddedRows, begin: int, end: int | None = None) -> AddedRows:
    """Rows [begin, end) of those that are added for a request, whose rows in front are computed."""
    if begin:
        one = replace(one, begin=int(one.positions[begin - 1]) + 1)
    return replace(one, positions=one.positions[begin:end])
