"""What ranks of data-parallel attention tell each other before a step."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_chunk_cache.host import dp_attention
from sglang_chunk_cache.request.chunk_request import Admission


def request(num_rows: int | None) -> Any:
    """One of SGLang's; None = nobody marked it, 0 = its rows are computed already."""
    if num_rows is None:
        return SimpleNamespace(chunk_cache_request=None)
    plan = SimpleNamespace(num_late_rows=0, row_positions=np.arange(num_rows))
    load: Any = SimpleNamespace(plan=plan) if num_rows else None
    return SimpleNamespace(chunk_cache_request=SimpleNamespace(admission=Admission(load=load)))


def test_rows_that_are_due_are_told_and_stay_due() -> None:
    batch: Any = SimpleNamespace(reqs=[request(3), request(None), request(0), request(4)], extend_num_tokens=10)
    told = []

    def tell(local_batch: Any, group: str) -> Any:
        told.append((local_batch.extend_num_tokens, group))
        return local_batch

    for _ in range(2):
        assert dp_attention.prepare_mlp_sync_batch(tell, batch, group="all") is batch
        assert batch.extend_num_tokens == 10
    assert told == [(17, "all")] * 2


def test_the_batch_is_as_it_was_where_the_others_do_not_answer() -> None:
    batch: Any = SimpleNamespace(reqs=[request(3)], extend_num_tokens=10)

    def fail(_: Any) -> Any:
        raise RuntimeError("timeout")

    with pytest.raises(RuntimeError, match="timeout"):
        dp_attention.prepare_mlp_sync_batch(fail, batch)
    assert batch.extend_num_tokens == 10


def test_a_rank_without_a_batch_tells_what_sglang_tells() -> None:
    idle: Any = object()
    assert dp_attention.prepare_mlp_sync_batch(lambda batch: idle if batch is None else None, None) is idle


def test_no_rank_replays_a_prefill_graph_where_a_request_has_marks() -> None:
    vote: Any = partial(dp_attention.vote_for_prefill_graph, lambda *, local_batch, num_tokens: num_tokens == 5)
    plain, marked = [request(None)], [request(None), request(0)]
    assert vote(local_batch=None, num_tokens=5)
    assert vote(local_batch=SimpleNamespace(reqs=plain), num_tokens=5)
    assert not vote(local_batch=SimpleNamespace(reqs=plain), num_tokens=6)
    assert not vote(local_batch=SimpleNamespace(reqs=marked), num_tokens=5)
