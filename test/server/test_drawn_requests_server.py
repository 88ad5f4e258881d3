"""Some hundred of the requests of the fuzz (`fuzz.py`), and what the server has and holds afterwards."""

from __future__ import annotations

import pytest

from server.fuzz import left_behind, run
from server_fixture import Server

pytestmark = pytest.mark.server


def test_nothing_breaks_it(server: Server):
    counts, broken = run(server.url, seed=20, numbers=range(300), at_once=8)
    assert broken == {}
    assert sum(num for (_, status), num in counts.items() if status == 200) > 100
    assert server.generate("Still there?")["text"]
    assert left_behind(server) == {}
