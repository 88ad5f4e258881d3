"""Choices: what the requests of a fused batch choose, drop or correct in its forward.

Verbs: `Choices.of` (puts together what they need on the device), `attention` (over rows that are known), `choose` (puts
the rows that questions have found in the places of the placeholders).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_kernel_ext.transfer import upload_groups
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.attending import Attention
from sglang_chunk_cache.forward.batch.row_arrays import positions_of
from sglang_chunk_cache.forward.positions import stand_at
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.selection.executor import LayerwiseForward
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.tables import Tables
from sglang_chunk_cache.kv.model_layers import ModelLayers
from sglang_chunk_cache.kv.ranks import ranks_of_batch

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class LateRows:
    """Rows of a request that its question finds.

    Attributes:
        num_load_rows: all rows in front of the ordinary extend, also those that are known before.
        prompt_ids: `[load_end]` token ids, on the device.
    """

    num_load_rows: int
    prompt_ids: torch.Tensor


@dataclass(frozen=True)
class Choices:
    """See the head of this file.

    Attributes:
        rows: of the forward that computes the answers; late rows are placeholders.
        requests: one per request of the batch.
        late: rows of requests whose question finds rows, by the request's place in the batch.
        layers: of the model.
        tp_size: ranks among which the heads are divided.
        lora_manager: SGLang's; None = without adapters.
    """

    rows: FusedRows
    requests: Sequence[RequestProgress]
    late: Mapping[int, LateRows]
    layers: ModelLayers
    tp_size: int
    lora_manager: LoRAManager | None

    @classmethod
    def of(
        cls,
        batch: ScheduleBatch,
        added: Sequence[AddedRows],
        rows: FusedRows,
        model_runner: ModelRunner,
        layers: ModelLayers,
    ) -> Choices:
        """The choices of `batch` with the added rows."""
        tp_size = ranks_of_batch().world_size
        choosing = {i: choice for i, one in enumerate(added) if (choice := one.choice) is not None}
        asks = {i: choice.plan for i, choice in choosing.items() if choice.selection.asks_first}
        all_ids = [np.frombuffer(batch.reqs[i].full_untruncated_fill_ids, dtype=np.int64) for i in asks]
        ids = [one[: plan.load_end] for one, plan in zip(all_ids, asks.values(), strict=True)]
        tables = {i: Tables.of(choice.plan, rows.kv_lens[i]) for i, choice in choosing.items()}
        positions_at = positions_of(batch, added)
        anyway = [positions_at[i][tables[i].chunk_at[positions_at[i]] < 0] for i in asks]
        *tables_on, ids_on, anyway_on = upload_groups([*tables.values(), ids, anyway], rows.row_positions.device)
        tables_of = {i: Tables(*one) for i, one in zip(tables, tables_on, strict=True)}
        late = {i: LateRows(len(added[i].positions), one) for i, one in zip(asks, ids_on, strict=True)}
        begun = list(rows.row_positions.split(rows.row_lens))
        for i, positions in zip(asks, anyway_on, strict=True):
            begun[i] = positions
        requests: list[RequestProgress] = []
        for i, positions in enumerate(begun):
            choice = choosing.get(i)
            if choice is None:
                requests.append(RequestProgress(positions))
                continue
            plan, state = choice.plan, choice.state
            num_tail = batch.extend_lens[i]
            tail_end = batch.prefix_lens[i] + num_tail
            start, end = choice.selection.question
            num_answer = min(max(tail_end - end, 0), num_tail - 1)
            progress = RequestProgress(
                positions,
                plan,
                tables_of[i],
                num_question=min(max(tail_end - num_answer - start, 1), num_tail - num_answer),
                num_answer=num_answer,
                num_layers=model_runner.model_config.num_hidden_layers,
                tp_size=tp_size,
                explain=state.options.explain,
            )
            # The reply of a retracted request reports its first forward.
            if state.reported is not None and state.admission.plan is state.reported.plan:
                state.reported.selection = progress.report
            requests.append(progress)
        return cls(rows, requests, late, layers, tp_size, model_runner.lora_manager)

    def choose(self, batch: ForwardBatch) -> Attention:
        """Writes the rows that the questions have found into `batch`; returns what attends then."""
        began, begin = time.perf_counter(), 0
        for i, (request, length) in enumerate(zip(self.requests, self.rows.row_lens, strict=True)):
            late = self.late.get(i)
            if late is not None:
                own = slice(begin, begin + late.num_load_rows)
                at = request.choose_rows()[: late.num_load_rows]
                batch.input_ids[own] = late.prompt_ids[at].to(batch.input_ids.dtype)
                batch.out_cache_loc[own] = self.rows.slots_of(i)[at].to(batch.out_cache_loc.dtype)
            begin += length
        positions = torch.cat([request.positions for request in self.requests])
        stand_at(batch, positions)
        for i in self.late:
            self.requests[i].count_seconds(time.perf_counter() - began)
        return self.attention(self.rows.with_rows(positions, self.rows.row_lens))

    def attention(self, rows: FusedRows) -> Attention:
        """What attends over these rows, which are known."""
        if any(request.rows_leave or request.corrects for request in self.requests):
            return LayerwiseForward(rows, self.requests, self.layers, self.tp_size, self.lora_manager)
        return rows
