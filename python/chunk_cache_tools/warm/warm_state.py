"""WarmState: how far the warming of a corpus has come, in a file.

Verbs: `load` (None if there is nothing to continue), `WarmState.advance`, `WarmState.save`. Promise: the file is
replaced as a whole, so it always holds a saved state, whenever the process dies.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chunk_cache_tools.jsonl import replace_file

VERSION = 1

MAX_FAILURES = 1000
"""Most failures that are kept with their text; all failures are counted."""


@dataclass
class WarmState:
    """Progress of one task.

    Attributes:
        task: identifies the task: hashes of the corpus, the server's URL and all options that change what is stored.
        epoch: `WarmServer.epoch` during the work; when it changes, everything that was stored is lost.
        line: number of lines that are done.
        offset: number of bytes of the corpus that are done.
        failures: `[line, sentence]` of the first lines that failed.
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
        """Notes that everything up to this line is done."""
        self.line, self.offset = line, offset
        self.num_stored += stored
        self.num_already += already

    def fail(self, line: int, problem: str) -> None:
        """Notes that a line failed; it is not tried again."""
        self.num_failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((line, problem))

    def save(self, path: Path) -> None:
        """Replaces the file.

        Raises:
            OSError: the file cannot be written.
        """
        replace_file(path, [json.dumps({"version": VERSION, **asdict(self)})])


def load(path: Path) -> WarmState | None:
    """The state that was saved last; None if there is no file, or it holds no state of this command.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("version") != VERSION:
            return None
        state = WarmState(**value)
        state.failures = [(int(line), str(problem)) for line, problem in state.failures]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return state
