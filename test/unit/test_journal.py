"""The journal: what it keeps of requests, for how long, and what several replicas have together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.types import MAX_ID_LEN, Status
from sglang_chunk_cache.admin.journal import (
    KINDS,
    NUM_CHUNK_IDS,
    NUM_COLUMNS,
    NUM_MINUTES,
    NUM_REQUESTS,
    Journal,
    merge,
    picture_of,
)
from sglang_chunk_cache.request.chunk_request import ChunkRequest, Reported

KEY = bytes(range(16))


def plan_of(prompt_len: int = 100, *, prefix_len: int = 10, hit: tuple[int, int] = (20, 60)) -> RecomputePlan:
    """A prompt with one chunk that is brought in; its first two tokens are recomputed."""
    start, end = hit
    rows = np.array([*range(prefix_len, start), start, start + 1], dtype=np.int64)
    chunk = ChunkPlan(start, end, Status.HIT, variant_id=1, dst_start=start, num_reused=end - start, generation=0)
    return RecomputePlan(
        prompt_len=prompt_len,
        prefix_len=prefix_len,
        load_start=prefix_len,
        load_end=end,
        chunks=(chunk,),
        method="epic",
        ratio=0.05,
        row_positions=rows,
        num_recomputed=2,
        num_reused=end - start,
    )


def note(
    journal: Journal,
    rid: str,
    plan: RecomputePlan,
    saved_s: float | None,
    chunk_id: str | None = "a" * 2 * MAX_ID_LEN,
    key: bytes = KEY,
) -> None:
    spans = tuple((chunk.start, chunk.end) for chunk in plan.chunks)
    options = RequestOptions(spans=spans, chunk_ids=(chunk_id,))
    reported = Reported(plan)
    state = ChunkRequest(ChunkPrompt(options, (key,)), reported=reported)
    journal.note(rid, "default", state, reported, saved_s)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(clock: Clock) -> Journal:
    return Journal(clock)


def counts(sums: dict[str, Any]) -> list[int]:
    return [sums[kind] for kind in KINDS]


def test_a_request_is_told_with_its_reply_and_its_keys(journal: Journal) -> None:
    note(journal, "r", plan_of(), saved_s=0.5)
    (one,) = journal.contents()["requests"]
    assert (one["id"], one["partition"], one["saved_s"]) == ("r", "default", 0.5)
    assert (one["prefix_tokens"], one["reused_tokens"], one["recomputed_tokens"], one["computed_tokens"]) == (
        10,
        40,
        2,
        50,
    )
    assert one["chunks"][0]["key"] == KEY.hex()
    assert one["chunks"][0]["id"] == "a" * MAX_ID_LEN
    note(journal, "r" * 1000, plan_of(), saved_s=0.5)
    assert journal.contents()["requests"][0]["id"] == "r" * MAX_ID_LEN


def test_sums_of_minutes_are_those_of_their_requests(journal: Journal, clock: Clock) -> None:
    for seconds in (0, 1, 61):
        clock.now = 1_000_020.0 + seconds
        note(journal, "r", plan_of(), saved_s=0.5)
    contents = journal.contents()
    assert [minute["requests"] for minute in contents["minutes"]] == [2, 1]
    assert [minute["at"] % 60 for minute in contents["minutes"]] == [0, 0]
    assert counts(contents["totals"]) == [30, 3 * 38, 6, 150]
    assert contents["totals"]["saved_s"] == 1.5
    assert sum(counts(contents["totals"])) == 3 * 100
    note(journal, "r", plan_of(), saved_s=None)
    totals = journal.contents()["totals"]
    assert (totals["requests"], totals["estimated"], totals["saved_s"]) == (4, 3, 1.5)


def test_it_is_bounded_and_keeps_the_newest(journal: Journal, clock: Clock) -> None:
    for number in range(3 * NUM_MINUTES):
        clock.now += 60.0
        note(journal, str(number), plan_of(), saved_s=0.0)
    contents = journal.contents()
    assert [one["id"] for one in contents["requests"]] == [str(3 * NUM_MINUTES - 1 - i) for i in range(NUM_REQUESTS)]
    assert len(contents["minutes"]) == NUM_MINUTES
    assert contents["totals"]["requests"] == 3 * NUM_MINUTES


def test_a_chunk_has_the_last_id_that_a_client_gave(journal: Journal) -> None:
    plan = plan_of()
    for chunk_id, known in ((None, None), ("old", "old"), ("b" * 2 * MAX_ID_LEN, "b" * MAX_ID_LEN), ("new", "new")):
        note(journal, "r", plan, None, chunk_id)
        assert journal.chunk_id(KEY) == known
    note(journal, "r", plan, None, None)
    assert journal.chunk_id(KEY) == "new", "a request that names nothing takes no name away"
    assert journal.chunk_id(bytes(16)) is None
    journal.forget_chunk_id(KEY)
    journal.forget_chunk_id(KEY)
    assert journal.chunk_id(KEY) is None


def test_ids_of_chunks_are_bounded_and_the_oldest_goes(journal: Journal) -> None:
    plan, keys = plan_of(), [number.to_bytes(16) for number in range(NUM_CHUNK_IDS + 1)]
    for key in (*keys[:-1], keys[0], keys[-1]):
        note(journal, "r", plan, None, key.hex(), key)
    unknown = [key for key in keys if journal.chunk_id(key) is None]
    assert unknown == [keys[1]], "the first was named again"


@pytest.mark.parametrize("prompt_len", [100, NUM_COLUMNS, 1000, 99_991])
def test_the_picture_has_every_token_once_and_in_its_place(prompt_len: int) -> None:
    plan = plan_of(prompt_len)
    picture = np.array(picture_of(plan))
    assert len(picture) == min(prompt_len, NUM_COLUMNS)
    assert picture.sum() == prompt_len
    assert picture.sum(axis=0).tolist() == [10, 38, 2, prompt_len - 50]
    assert np.ptp(picture.sum(axis=1)) <= 1, "slices of one length"
    if prompt_len == 100:  # a token a column
        assert [KINDS[row.argmax()] for row in picture[[0, 9, 10, 19, 20, 21, 22, 59, 60, 99]]] == [
            *("prefix", "prefix", "computed", "computed", "recomputed"),
            *("recomputed", "reused", "reused", "computed", "computed"),
        ]


def test_replicas_together_are_as_one(clock: Clock) -> None:
    one, other, all_of_it = Journal(clock), Journal(clock), Journal(clock)
    for number in range(6):
        clock.now += 40.0
        for journal in ((one, other)[number % 2], all_of_it):
            note(journal, str(number), plan_of(), saved_s=0.25)
    assert merge([one.contents(), other.contents()]) == all_of_it.contents()
