"""What ranks of data-parallel attention tell each other before a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter

from sglang_chunk_cache.host.dp_attention import ChunkDPAttnAdapter
from sglang_chunk_cache.request.chunk_request import Admission


def request(num_rows: int | None) -> Any:
    """One of SGLang's; None = nobody marked it, 0 = its rows are computed already."""
    if num_rows is None:
        return SimpleNamespace(chunk_cache_request=None)
    plan = SimpleNamespace(selection=None, row_positions=np.arange(num_rows))
    load: Any = SimpleNamespace(plan=plan) if num_rows else None
    return SimpleNamespace(chunk_cache_request=SimpleNamespace(admission=Admission(load=load)))


def told(monkeypatch: pytest.MonkeyPatch, batch: Any, tell: Callable[[Any], Any]) -> Any:
    """What comes back where `tell` is in the place of SGLang's own, which asks other processes."""
    monkeypatch.setattr(SchedulerDPAttnAdapter, "prepare_mlp_sync_batch", lambda _, local_batch: tell(local_batch))
    return ChunkDPAttnAdapter.prepare_mlp_sync_batch(object.__new__(ChunkDPAttnAdapter), batch)


def test_rows_that_are_due_are_told_and_stay_due(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = SimpleNamespace(reqs=[request(3), request(None), request(0), request(4)], extend_num_tokens=10)
    for _ in range(2):
        assert told(monkeypatch, batch, lambda one: one.extend_num_tokens) == 17
        assert batch.extend_num_tokens == 10


def test_the_batch_is_as_it_was_where_the_others_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = SimpleNamespace(reqs=[request(3)], extend_num_tokens=10)

    def fail(_: Any) -> Any:
        raise RuntimeError("timeout")

    with pytest.raises(RuntimeError, match="timeout"):
        told(monkeypatch, batch, fail)
    assert batch.extend_num_tokens == 10


def test_a_rank_without_a_batch_tells_what_sglang_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: Any = object()
    assert told(monkeypatch, None, lambda batch: idle if batch is None else None) is idle
