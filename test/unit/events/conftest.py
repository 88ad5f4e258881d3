from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from unit.events.replica import Replica


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Callable[[str], Replica]]:
    """Makes replicas, which are gone after the test."""
    with ExitStack() as stack:

        def make(name: str) -> Replica:
            made = Replica(tmp_path, name)
            stack.callback(lambda: made.stop())
            return made

        yield make
