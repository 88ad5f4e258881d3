"""WarmState: how far the warming of a corpus has come, in a file.

Verbs: `load` (None where there is nothing to continue), `WarmState.advance`, `WarmState.save`. Promise: the file is
replaced as a whole, so that whenever the process dies it holds one of the states that were saved.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1

MAX_FAILURES = 1000
"""Failures that are remembered with their text; all are counted."""


@dataclass
class WarmState:
    """Progress of one task.

    Attributes:
        task: what makes two runs the same: the hash of the corpus, and every option that changes what is stored.
        epoch: which life of which server the work was done for; what it had computed is lost with it.
        line: lines that are done.
        offset: bytes of the corpus that are done.
        failures: `[line, sentence]` of the first that failed.
    """

    task: dict[str, Any]
    epoch: str
    line: int = 0
    offset: int = 0
    num_stored: int = 0
    num_already: int = 0
    num_failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def advance(self, line: int, offset: int, *, stored: int = 0, already: int = 0) -> None:
        """Everything up to here is done."""
        self.line, self.offset = line, offset
        self.num_stored += stored
        self.num_already += already

    def fail(self, line: int, problem: str) -> None:
        """One line failed; it is not tried again."""
        self.num_failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((line, problem))

    def save(self, path: Path) -> None:
        """Replaces the file.

        Raises:
            OSError: it cannot be written.
        """
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def load(path: Path) -> WarmState | None:
    """The state that was saved last; None where there is none, or it is not one of ours.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("version") != VERSION:
            return None
        state = WarmState(**value)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    state.failures = [(int(line), str(problem)) for line, problem in state.failures]
    return state
