"""JSONL files: `read_jsonl` gives (`file:line`, object) for every line, or raises a `DataError`.

`object_in` reads one line, or another text from a user that must be a JSON object; `refuse_pipe` checks a path, and
`replace_file` writes a file as a whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, one_line


class DataError(ChunkCacheRequestError):
    """A data file is missing or broken; the message names the file, the line and the remedy."""


_LOGGED = re.compile(r"^\[[^\]]*\] (?=\{.*\"event\")")  # the time in front of an event in a server's log


def object_in(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: there is none; the message says why, as a part of a sentence.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("objects or lists are nested too deep") from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise ValueError(f"not JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def refuse_pipe(path: Path) -> None:
    """Raises a `DataError` where a path is a pipe: our commands read their files more than once."""
    if path.is_fifo():
        raise DataError(f"{path}: a pipe, which can be read once only; write its lines into a file.")


def replace_file(path: Path, texts: Iterable[str]) -> None:
    """Replaces a file as a whole: whenever the process dies, or the disk is full, it is the old one or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(texts)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_jsonl(path: str | Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) for every line that is not empty; for a server's log, for every event in it.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    path = Path(path)
    refuse_pipe(path)
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
            value = object_in(line)
        except ValueError as error:
            raise DataError(f"{where}: {error}; give one object per line.") from None
        yield where, value
