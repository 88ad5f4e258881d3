"""Some hundred requests from the schema of our routes (`schema.py`), and what the server holds afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.admin_server import AdminServer
from server.conftest import FLAGS, STRICT
from server.schema import FLAGS as OURS
from server.schema import held_by, run

pytestmark = [pytest.mark.all, pytest.mark.server]


@pytest.fixture(scope="module")
def asked(model_dir: Path) -> Iterator[AdminServer]:
    with AdminServer(model_dir, *FLAGS, *OURS, env=STRICT) as server:
        yield server


def test_what_the_schema_says_holds(asked: AdminServer):
    counts, broken = run(asked.url, seed=20, num=500)
    assert broken == []
    assert sum(num for (_, kind, _), num in counts.items() if kind == "wrong") > 50
    assert sum(num for (_, _, status), num in counts.items() if status == 200) > 50
    assert asked.generate("Still there?")["text"]
    assert held_by(asked) == {}
