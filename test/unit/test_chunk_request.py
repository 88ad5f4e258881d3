"""One request in the scheduler process: what a retraction leaves of it, and what a draft is told of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chunk_cache.options.kept_tokens import KeptTokens
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.forward import Forward, Part, TargetForwards, announce, announced
from sglang_chunk_cache.kv.pool import Load
from sglang_chunk_cache.request.chunk_request import Admission, ChunkRequest


def admitted() -> tuple[ChunkRequest, Any]:
    plan: Any = SimpleNamespace(load_len=3)
    request = ChunkRequest(ChunkPrompt(RequestOptions(spans=((0, 3),)), (b"",)))
    request.admission.propose(plan)
    request.admission.bring_in(Load(plan, torch.arange(3), ()))
    request.report(plan)
    return request, plan


def test_a_load_is_taken_once_and_the_prompt_stays_fused() -> None:
    request, plan = admitted()
    load = request.admission.take_load()
    assert load is not None
    assert load.plan is plan
    assert request.admission.take_load() is None
    assert request.admission.fused_plan is plan


def test_a_retraction_leaves_what_outlives_the_kv() -> None:
    request, plan = admitted()
    request.packing.plan(KeptTokens(0, 3, 1))
    request.packing.choose(torch.zeros(1, 1, 1, dtype=torch.int64))
    request.restart()
    assert request.admission == Admission()
    assert (request.packing.kept, request.packing.chosen, request.sums) == (None, None, None)
    assert request.reported is not None
    assert request.reported.plan is plan


def test_a_reply_speaks_of_the_plan_without_the_load_that_failed() -> None:
    request, _ = admitted()
    without: Any = SimpleNamespace(load_len=0)
    request.fail_load(without)
    assert request.reported is not None
    assert request.reported.plan is request.admission.fused_plan is without
    assert request.admission.load_plan is None


def test_nothing_that_was_announced_outlives_its_forward() -> None:
    batch: Any = SimpleNamespace()
    forward = Forward((Part(batch, attention=SimpleNamespace()),))  # type: ignore[arg-type]
    assert announce(forward) is batch
    assert announced(batch) is forward
    assert vars(batch) == {}, "or the batch would hold itself"


def test_a_draft_is_told_the_rows_of_the_same_batch_once() -> None:
    forwards, added = TargetForwards(), (AddedRows(np.arange(2)),)
    batch: Any
    other: Any
    batch, other = object(), object()
    forward = Forward((Part(SimpleNamespace()),), added)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(batch)
    forwards.note(batch, forward)
    assert forwards.take(batch) is added
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(batch)
    forwards.note(batch, forward)
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(other)
