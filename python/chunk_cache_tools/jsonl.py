"""JSONL files: `read_jsonl` gives (`file:line`, object) for every line, or raises a `DataError`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError


class DataError(ChunkCacheRequestError):
    """A data file is missing or broken; the message names the file, the line and the remedy."""


_LOGGED = re.compile(r"^\[[^\]]*\] (?=\{.*\"event\")")  # the time in front of an event in a server's log


def read_jsonl(path: str | Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for every line that is not empty; for a server's log, for every event in it.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give the path of a UTF-8 JSONL file.") from error
    lines = text.split("\n")
    is_log = any(map(_LOGGED.match, lines))
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (is_log and not _LOGGED.match(line)):
            continue
        line = _LOGGED.sub("", line)
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error}); give one object per line.") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: not an object; give one object per line.")
        yield where, value
