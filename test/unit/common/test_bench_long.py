"""The benchmark of long prompts: rows that all stand where equal scores would put them end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmark.gpu.bench_long import spread_of
from benchmark.ttft.measure import System
from benchmark.ttft.workload import QUICK, Workload

SYSTEM = System("a3, ratio 0.25", {"method": "a3", "ratio": 0.25})


class Server:
    """Answers that these places within each reused chunk are recomputed."""

    def __init__(self, places: list[range]) -> None:
        self.places = places

    def generate(self, ids: list[int], chunk_cache: dict[str, Any]) -> SimpleNamespace:
        assert chunk_cache["explain"]
        first, *reused = chunk_cache["spans"]
        chunks = [
            {"start": start, "end": end, "variant": 1, "recomputed_positions": [start + one for one in places]}
            for (start, end), places in zip(reused, self.places, strict=True)
        ]
        return SimpleNamespace(chunk_cache={"chunks": [{"start": first[0], "end": first[1]}, *chunks]})


def test_rows_that_spread_are_told() -> None:
    server = Server([range(0, QUICK.chunk_len, 4)] * QUICK.num_reused_chunks)
    assert spread_of(server, Workload(QUICK), SYSTEM) == {"late": 0.5, "first": 0.25}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "places",
    [
        [range(QUICK.chunk_len), *[range(0)] * (QUICK.num_reused_chunks - 1)],
        [range(QUICK.chunk_len // 4)] * QUICK.num_reused_chunks,
    ],
    ids=["first-chunk", "beginnings"],
)
def test_rows_of_equal_scores_are_no_measurement(places: list[range]) -> None:
    with pytest.raises(RuntimeError, match="are all scores equal"):
        spread_of(Server(places), Workload(QUICK), SYSTEM)  # type: ignore[arg-type]
