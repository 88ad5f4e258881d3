"""A few hundred of the fuzz's requests (`fuzz.py`), and what the server has and holds afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.conftest import FLAGS, STRICT
from server.fuzz import left_behind, run
from server_fixture import Server

pytestmark = [pytest.mark.all, pytest.mark.server]


@pytest.fixture(scope="module")
def fuzzed(model_dir: Path) -> Iterator[Server]:
    flags = ("--chunk-cache", "--chunk-cache-marks", "--chunk-cache-parts", "--chunk-cache-discover")
    with Server(model_dir, *FLAGS, *flags, env=STRICT) as server:
        yield server


def test_nothing_breaks_it(fuzzed: Server):
    counts, broken = run(fuzzed.url, seed=20, numbers=range(600), at_once=8)
    assert broken == []
    assert sum(num for (_, status), num in counts.items() if status == 200) > 100
    assert fuzzed.generate("Still there?")["text"]
    assert left_behind(fuzzed) == {}
