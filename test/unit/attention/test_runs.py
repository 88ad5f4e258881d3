"""Runs of rows: nothing lost, nothing joined, in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_chunk_cache.forward.runs import Runs

rows_of_a_request = st.sets(st.integers(0, 60), min_size=1).map(sorted)


@given(st.lists(rows_of_a_request, min_size=1, max_size=5))
def test_runs_are_the_rows(requests):
    pool_rows = list(range(7, 7 + len(requests)))
    runs = Runs.of([np.array(rows, dtype=np.int64) for rows in requests], pool_rows)
    triples = list(zip(runs.pool_rows.tolist(), runs.starts.tolist(), runs.lens.tolist(), strict=True))
    listed = [(row, position) for row, start, length in triples for position in range(start, start + length)]
    assert listed == [(row, position) for row, rows in zip(pool_rows, requests, strict=True) for position in rows]
    ends = {(row, start + length) for row, start, length in triples}
    assert ends.isdisjoint((row, start) for row, start, _ in triples)  # each is as long as can be
    pool_rows, ends, starts, lens, begins = runs.arrays()
    assert (ends - starts == lens).all()
    assert (begins == np.cumsum([0, *lens[:-1]])).all()


def test_whom_a_backend_serves():
    """Those whose rows stay, in one run or in long ones; each is judged by itself."""
    alone, plain = np.arange(0, 60, 3), np.arange(40, 300)
    long, decoded = np.concatenate([np.arange(0, 20), np.arange(50, 90)]), np.array([77])
    requests = [alone, plain, long, decoded, plain]
    runs, serves = Runs.worthwhile(requests, [7, 8, 9, 10, 11], [True, True, True, True, False], min_len=8)
    assert serves == [False, True, True, True, False]
    assert runs.pool_rows.tolist() == [8, 9, 9, 10]
    assert runs.lens.tolist() == [260, 20, 40, 1]
    assert not Runs.worthwhile([alone], [7], [True], min_len=8)[0].lens.size
    # One that has no rows in this part of the batch stands in nobody's way.
    assert Runs.worthwhile([plain, np.empty(0, dtype=np.int64)], [8, 9], [True, True], min_len=8)[1] == [True, True]
