"""The attention of a fused batch in which at least one request has something to choose or to drop.

Verb: `layerwise_forward` (puts together what the rows need on the device, and uploads it at once).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.distributed import get_tp_group

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.added_rows import NO_ROWS, AddedRows
from sglang_chunk_cache.forward.batch.row_arrays import extend_positions
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.selection.executor import FirstPass, LateRows, LayerwiseForward
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.tables import Tables
from sglang_chunk_cache.kv.model_layers import ModelLayers

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def layerwise_forward(
    batch: ScheduleBatch, added: Sequence[AddedRows], rows: FusedRows, model_runner: ModelRunner, layers: ModelLayers
) -> LayerwiseForward:
    """The forward of `batch` with the added rows, which begins with all `rows`."""
    tp_size = get_tp_group().world_size
    choosing = {i: choice for i, one in enumerate(added) if (choice := one.choice) is not None}
    asking = {i: choice.plan for i, choice in choosing.items() if choice.plan.num_late_rows}
    # What must be computed in any case asks, without the placeholders.
    first = [
        np.concatenate((plan.row_positions, extend_positions(batch, i))) if (plan := asking.get(i)) else NO_ROWS
        for i in range(len(added))
    ]
    prompts = [np.frombuffer(batch.reqs[i].full_untruncated_fill_ids, dtype=np.int64) for i in asking]
    begins = np.cumsum([0, *rows.kv_lens[:-1]])
    first_ids = [ids[first[i]] for i, ids in zip(asking, prompts, strict=True)]
    tables = [Tables.of(choice.plan, rows.kv_lens[i]) for i, choice in choosing.items()]
    uploaded = iter(
        upload(
            [
                *(array for one in tables for array in one),
                *(ids[: plan.load_end] for ids, plan in zip(prompts, asking.values(), strict=True)),
                np.concatenate(first),
                np.concatenate([NO_ROWS, *first_ids]),
                np.concatenate([own + begin for own, begin in zip(first, begins, strict=True)]),
            ],
            rows.row_positions.device,
        )
    )
    tables_of = {i: Tables(*itertools.islice(uploaded, len(Tables._fields))) for i in choosing}
    prompt_ids = {i: next(uploaded) for i in asking}
    first_positions, ids_on_device, places = uploaded
    first_lens = [len(own) for own in first]
    first_pass = FirstPass(first_lens, first_positions, ids_on_device, rows.kv_indices[places]) if asking else None
    starts = zip(first_positions.split(first_lens), rows.row_positions.split(rows.row_lens), added, strict=True)
    requests: list[RequestProgress] = []
    late: list[LateRows | None] = []
    for i, (asked, positions, one) in enumerate(starts):
        late.append(LateRows(len(one.positions), prompt_ids[i]) if i in asking else None)
        choice = choosing.get(i)
        if choice is None:
            requests.append(RequestProgress.unchanged(positions))
            continue
        plan, state = choice.plan, choice.state
        num_tail = batch.extend_lens[i]
        tail_end = batch.prefix_lens[i] + num_tail
        start, end = choice.selection.question
        num_answer = min(max(tail_end - end, 0), num_tail - 1)
        progress = RequestProgress(
            plan,
            tables_of[i],
            asked if i in asking else positions,
            num_question=min(max(tail_end - num_answer - start, 1), num_tail - num_answer),
            num_answer=num_answer,
            num_layers=model_runner.model_config.num_hidden_layers,
            tp_size=tp_size,
            explain=state.options.explain,
        )
        # A retracted request's reply speaks of its first forward.
        if state.reported is not None and state.admission.plan is state.reported.plan:
            state.reported.selection = progress.report
        requests.append(progress)
    return LayerwiseForward(rows, requests, late, first_pass, layers, tp_size, model_runner.lora_manager)
