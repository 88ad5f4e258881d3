"""A user's trace: one request per line of a JSONL file, in the order of their arrival.

    {"chunks": [{"id": "manual/3", "length": 512}, {"id": "faq/1", "length": 80}], "question_len": 40, "session": 7}
    {"chunks": [{"id": "faq/1"}, {"text": "The warranty covers two years."}]}

A chunk has an `id`, or a `text` that is its own id. `length` is its number of tokens. Without `length`, a chunk that
appeared before has its earlier length, and a new text has its characters divided by `chars_per_token`, rounded up.
`question_len` and `session` may be left out. `read_jsonl` reads such a file, `write_jsonl` writes one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.simulate.trace import Request, Trace, TraceError

from chunk_cache.errors import show
from chunk_cache_tools import jsonl

QUESTION_LEN = 32
REQUEST_KEYS = ("chunks", "question_len", "session")
CHUNK_KEYS = ("id", "text", "length")


def read_jsonl(path: Path, *, system_len: int, chars_per_token: float = 4.0) -> Trace:
    """The requests of a file; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
        TraceError: the file does not have this format; the message says file, line, field and remedy.
    """
    reader = _Reader(chars_per_token)
    requests = []
    for place, value in jsonl.read_jsonl(path):
        reader.place = place
        requests.append(reader.request(value))
    if not requests:
        raise TraceError(f"{path}: holds no request; give one JSON object per line")
    return Trace(path.stem, tuple(requests), tuple(reader.lengths), system_len)


def write_jsonl(trace: Trace, path: Path) -> None:
    """Writes the requests of a trace; text that is not marked, and tenants, are left out."""
    lines = []
    for request in trace.requests:
        chunks = [{"id": chunk, "length": trace.lengths[chunk]} for chunk in request.chunks]
        lines.append(
            json.dumps({"chunks": chunks, "question_len": request.question_len, "session": request.session}) + "\n"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


@dataclass(slots=True)
class _Reader:
    chars_per_token: float
    place: str = ""
    lengths: list[int] = field(default_factory=list)
    numbers: dict[tuple[str, str | int], int] = field(default_factory=dict)

    def request(self, value: Mapping[str, object]) -> Request:
        self._check_keys(value, "", REQUEST_KEYS)
        chunks = value.get("chunks")
        if not isinstance(chunks, list):
            raise self._error("chunks", f"{show(chunks)} is not a list", 'give a list such as [{"id": 1, "length": 9}]')
        return Request(
            tuple(self._chunk(item, f"chunks[{i}]") for i, item in enumerate(chunks)),
            self._integer(value.get("question_len", QUESTION_LEN), "question_len", 1),
            self._integer(value.get("session", 0), "session", 0),
        )

    def _chunk(self, item: object, where: str) -> int:
        item = self._check_keys(item, where, CHUNK_KEYS)
        if ("id" in item) == ("text" in item):
            raise self._error(where, "has not exactly one of id and text", 'give {"id": …, "length": …} or {"text": …}')
        kind = "id" if "id" in item else "text"
        name = item[kind]
        if isinstance(name, bool) or not isinstance(name, str if kind == "text" else (str, int)):
            wanted = "a string" if kind == "text" else "a string or an integer"
            raise self._error(f"{where}.{kind}", f"{show(name)} is not {wanted}", f"give {wanted}")
        assert isinstance(name, (str, int))
        known = self.numbers.get((kind, name))
        length = self._length(item, name if kind == "text" else None, known, where)
        if known is None:
            known = self.numbers[kind, name] = len(self.lengths)
            self.lengths.append(length)
        return known

    def _length(self, item: Mapping[str, object], text: object, known: int | None, where: str) -> int:
        if "length" in item:
            length = self._integer(item["length"], f"{where}.length", 1)
            if known is not None and self.lengths[known] != length:
                problem = f"{length}, but the same chunk had {self.lengths[known]} tokens before"
                raise self._error(f"{where}.length", problem, "give chunks that differ different ids")
            return length
        if known is not None:
            return self.lengths[known]
        if not isinstance(text, str):
            raise self._error(where, "has no length, and no line before says it", 'add "length": tokens of the chunk')
        return max(1, math.ceil(len(text) / self.chars_per_token))

    def _check_keys(self, value: object, where: str, keys: tuple[str, ...]) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise self._error(where, f"{show(value)} is not an object", f"give an object with {', '.join(keys)}")
        for key in value:
            if key not in keys:
                raise self._error(where, f"unknown key {show(key)}", f"known keys: {', '.join(keys)}")
        return value

    def _integer(self, value: object, where: str, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise self._error(where, f"{show(value)} is not an integer of at least {least}", "give such an integer")
        return value

    def _error(self, where: str, problem: str, remedy: str) -> TraceError:
        return TraceError(": ".join(part for part in (self.place, where, problem) if part) + f"; {remedy}")
