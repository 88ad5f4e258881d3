"""Corpus: the lines of a JSONL file, each with one chunk.

Verbs: `open_corpus` (reads the file once, for its hash and its number of lines), `Corpus.lines` (from any line on).
Promise: a bad line raises no error but becomes a `Line` with a `problem`; empty lines are skipped, but counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import is_unicode, show
from chunk_cache.prompt.marks import is_blank
from chunk_cache_tools.jsonl import object_in, refuse_pipe

_BLOCK_LEN = 1 << 20


@dataclass(frozen=True)
class Line:
    """One line that is not empty.

    Attributes:
        number: counted from 1.
        end: offset in bytes of the next line.
        text: the chunk; None if the line is bad.
        problem: what is wrong with the line; None if it is good.
        neighbours: value of the field `neighbours`, unchecked; None if there is none.
    """

    number: int
    end: int
    text: str | None
    problem: str | None = None
    neighbours: Any = None


@dataclass(frozen=True)
class Corpus:
    """A file, as it was when it was opened.

    Attributes:
        field: name of the field with the chunk.
        digest: hash of the file's bytes.
    """

    path: Path
    field: str
    digest: str
    num_lines: int

    def lines(self, number: int = 0, offset: int = 0) -> Iterator[Line]:
        """The lines after line `number`, which ends at byte `offset`."""
        with self.path.open("rb") as file:
            file.seek(offset)
            for raw in file:
                number += 1
                offset += len(raw)
                if raw.strip():
                    yield self._parse(raw, number, offset)

    def _parse(self, raw: bytes, number: int, end: int) -> Line:
        try:
            value = object_in(raw)
        except ValueError as error:
            return Line(number, end, None, str(error))
        if self.field not in value:
            return Line(number, end, None, f"has no field {self.field!r}")
        text = value[self.field]
        if not isinstance(text, str):
            return Line(number, end, None, f"{self.field}: {show(text)} is not a string")
        if not is_unicode(text):
            return Line(number, end, None, f"{self.field}: half of a surrogate pair, which is no character")
        if is_blank(text):
            return Line(number, end, None, f"{self.field}: the text is empty")
        return Line(number, end, text, neighbours=value.get("neighbours"))


def open_corpus(path: Path, field: str) -> Corpus:
    """Reads a file once.

    Raises:
        OSError: the file cannot be read.
        DataError: it is a pipe.
    """
    refuse_pipe(path)
    digest = hashlib.sha256()
    num_lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK_LEN):
            digest.update(block)
            num_lines += block.count(b"\n")
            last = block[-1:]
    return Corpus(path, field, digest.hexdigest(), num_lines + (last != b"\n"))
