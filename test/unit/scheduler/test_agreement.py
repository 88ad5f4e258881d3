"""What ranks agree on, against an oracle that looks at what each of them found."""

from __future__ import annotations

import random

import numpy as np

from chunk_cache.tiers.agreement import ABSENT, UNKNOWN, Verdict, agree, vote_for


def test_ranks_use_what_all_found_alike() -> None:
    rng = random.Random(0)
    for _ in range(300):
        found = [[_draw(rng) for _ in range(rng.randint(1, 4))]]
        found += [[one if rng.random() < 0.6 else _draw(rng) for one in found[0]] for _ in range(rng.randint(0, 2))]
        votes = [[_vote(one) for one in rank] for rank in found]
        both = [np.concatenate([np.array(rank), -np.array(rank)]) for rank in votes]
        verdicts = [agree(rank, lambda _, both=both: np.maximum.reduce(both)) for rank in votes]
        assert verdicts == [[_expected(list(chunk)) for chunk in zip(*found, strict=True)]] * len(found)


def test_statistics_and_streams_are_part_of_a_vote() -> None:
    votes = {
        vote_for(name, statistics, is_streamed=streamed)
        for name in ("a", "b")
        for statistics in (b"", b"\x00")
        for streamed in (False, True)
    }
    assert len(votes) == 8
    assert votes.isdisjoint((UNKNOWN, ABSENT))
    assert all(vote < 2**62 for vote in votes), "they are reduced as int64"


def _draw(rng: random.Random) -> str | tuple[str, bool]:
    return rng.choice(("unknown", "absent", ("a", False), ("a", True), ("b", False)))


def _vote(found: str | tuple[str, bool]) -> int:
    if isinstance(found, str):
        return {"unknown": UNKNOWN, "absent": ABSENT}[found]
    return vote_for(found[0], b"", is_streamed=found[1])


def _expected(found: list[str | tuple[str, bool]]) -> Verdict:
    if len(set(found)) == 1:
        return Verdict.SAME
    names = {one if isinstance(one, str) else one[0] for one in found}
    return Verdict.OF_NO_USE if "unknown" not in names and len(names) > 1 else Verdict.DIFFERENT
