"""Parts of a batch: rows for which one step has no room are computed ahead, each behind those of its request."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_chunk_cache.forward.added_rows import NOTHING_ADDED, AddedRows
from sglang_chunk_cache.forward.batch import fused_batch as module
from sglang_chunk_cache.forward.batch.fused_batch import FusedBatch

STEP_LEN = 64


@pytest.fixture
def parts_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `FusedBatch.parts` computes at once: of each part the batch, the rows added, and what it shares."""
    monkeypatch.setattr(module, "step_len", lambda: STEP_LEN)

    def part(self: FusedBatch, batch: Any, added: Any, *, is_ahead: bool = False, first: Any = None) -> Any:
        return SimpleNamespace(batch=batch, added=added, is_ahead=is_ahead, first=first)

    def choosing(self: FusedBatch, added: Any, layers: Any, first: Any) -> Any:
        return (part(self, self.batch, added, first=first),)

    monkeypatch.setattr(FusedBatch, "_part", part)
    monkeypatch.setattr(FusedBatch, "_choosing", choosing)

    def parts(added: list[AddedRows], tail_lens: list[int], layers: Any = "of a model") -> Any:
        batch: Any = SimpleNamespace(
            prefix_lens=[1000] * len(added),
            extend_lens=tail_lens,
            extend_logprob_start_lens=[0] * len(added),
            return_logprob=True,
            replace_embeds="of others",
            replace_positions="of others",
        )
        return batch, FusedBatch(batch, None, None, "torch", None, layers).parts(added)  # type: ignore[arg-type]

    return parts


def num_rows(part: Any) -> int:
    return sum(len(one.positions) for one in part.added) + sum(part.batch.extend_lens)


def chooser(num: int) -> AddedRows:
    plan = SimpleNamespace(selection="something")
    load: Any = SimpleNamespace(plan=plan, layer_copies=())
    state: Any = "of a request"
    return AddedRows(np.arange(num), 0, load, state)


@pytest.mark.parametrize("seed", range(20))
def test_no_part_has_more_rows_than_a_step_and_none_is_lost(parts_of: Any, seed: int) -> None:
    rng = random.Random(seed)
    added = [
        NOTHING_ADDED if rng.random() < 0.2 else AddedRows(np.sort(rng.sample(range(1000), rng.randint(0, 300))), 0)
        for _ in range(rng.randint(1, 5))
    ]
    batch, parts = parts_of(added, [rng.randint(1, 8) for _ in added])
    *ahead, last = parts
    assert last.batch is batch
    assert max(map(num_rows, parts)) <= STEP_LEN
    assert all(num_rows(part) == STEP_LEN for part in ahead[:-1]), "no more parts than needed"
    for i, one in enumerate(added):
        computed = [part.added[i] for part in parts]
        assert np.concatenate([own.positions for own in computed]).tolist() == one.positions.tolist()
        done = one.begin
        for own in computed:
            assert own.begin == done
            done = int(own.positions[-1]) + 1 if len(own.positions) else done
    for part in ahead:
        assert part.is_ahead
        assert (part.batch.prefix_lens, set(part.batch.extend_lens)) == ([1000 + n for n in batch.extend_lens], {0})
        assert (part.batch.return_logprob, part.batch.replace_positions) == (False, None)
    assert not last.is_ahead


def test_what_has_room_is_one_part(parts_of: Any) -> None:
    added = [AddedRows(np.arange(40), 0), AddedRows(np.arange(20), 0)]
    _, (part,) = parts_of(added, [2, 2])
    assert part.added is added


def test_rows_that_decode_beside_leave_room_for_none(parts_of: Any) -> None:
    added = [AddedRows(np.arange(0), 0), *[NOTHING_ADDED] * STEP_LEN]
    _, parts = parts_of(added, [1] * len(added))
    assert len(parts) == 1, "there is nothing to compute ahead"


def test_rows_of_a_request_that_chooses_stay_with_its_question(parts_of: Any) -> None:
    added = [AddedRows(np.arange(100), 0), chooser(60), AddedRows(np.arange(30), 0)]
    batch, parts = parts_of(added, [3, 3, 3])
    first, *_, last = parts
    assert [num_rows(part) for part in parts] == [64, 64, 2, 60 + 9]
    assert [len(one.positions) for one in last.added] == [0, 60, 0]
    assert last.first is first
    assert last.batch is batch


def test_a_draft_follows_no_choice(parts_of: Any) -> None:
    added = [one.for_draft() for one in (AddedRows(np.arange(100), 0), AddedRows(np.arange(50), 0))]
    _, parts = parts_of(added, [3, 3], layers=None)
    assert [num_rows(part) for part in parts] == [64, 28, 64]
