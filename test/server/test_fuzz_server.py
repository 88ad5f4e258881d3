"""The fuzz (`fuzz.py`): ten thousand requests, shared by servers of several kinds, and what each holds afterwards.

`pytest --all --fuzz-num 10000 --fuzz-seed 1` says how many and which; `test_drawn_requests_server.py` sends a few.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from server.fuzz import KINDS, ask_kind, shares

pytestmark = [pytest.mark.all, pytest.mark.server]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_breaks_it(kind: str, tmp_path: Path, pytestconfig: pytest.Config):
    num, seed = pytestconfig.getoption("--fuzz-num"), pytestconfig.getoption("--fuzz-seed")
    found = ask_kind(kind, tmp_path, shares(num)[kind], seed, at_once=16)
    assert found["broken"] == {}
    assert found["left"] == {}
