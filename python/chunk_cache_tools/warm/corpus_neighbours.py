"""Neighbourhood: the neighbours of each chunk of a corpus, behind which it is computed, by the numbers of their lines.

Verbs: `find` (finds neighbours by similarity), `read` (reads them from the field `neighbours` of each line),
`Neighbourhood.body` (the request that warms some lines). Promise: a line whose neighbours cannot be used becomes a
`Line` with a problem; a line that repeats an earlier chunk has the neighbours of that line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chunk_cache.errors import show
from chunk_cache.plan.neighbours import find_neighbours
from chunk_cache_tools.warm.corpus import Corpus, Line

FIELD = "neighbours"


@dataclass(frozen=True)
class Neighbourhood:
    """See the head of this file.

    Attributes:
        of: line number -> line numbers of its neighbours.
        texts: line number -> chunk.
        problems: line number -> why the chunk cannot be prepared.
        repeated: line number -> number of the first line with the same chunk.
    """

    of: Mapping[int, tuple[int, ...]]
    texts: Mapping[int, str]
    problems: Mapping[int, str]
    repeated: Mapping[int, int]

    def check(self, line: Line) -> Line:
        """The line; marked as bad if it cannot be prepared."""
        problem = self.problems.get(line.number)
        return line if problem is None else replace(line, text=None, problem=problem)

    def body(self, lines: Sequence[Line]) -> tuple[dict[str, Any], list[int]]:
        """Fields of the request that warms these good lines, and the line number of each of its texts."""
        numbers = [line.number for line in lines]
        numbers = list(dict.fromkeys((*numbers, *(other for number in numbers for other in self.of[number]))))
        places = {number: place for place, number in enumerate(numbers)}
        neighbours = [[places[other] for other in self.of[line.number]] for line in lines]
        return {"texts": [self.texts[number] for number in numbers], "neighbours": neighbours}, numbers


def find(corpus: Corpus, num: int, retriever: str) -> Neighbourhood:
    """The most similar chunks of each chunk, at most `num`.

    Raises:
        ChunkCacheRequestError: the retriever cannot be used.
    """
    texts, repeated = _texts(corpus.lines())
    numbers = list(texts)
    found = find_neighbours(list(texts.values()), num, retriever, path=f"--retriever {retriever}")
    of = {number: tuple(numbers[i] for i in places) for number, places in zip(numbers, found, strict=True)}
    return Neighbourhood(of, texts, {}, repeated)


def read(corpus: Corpus) -> Neighbourhood:
    """The neighbours that the file names."""
    lines = list(corpus.lines())
    texts, repeated = _texts(lines)
    bad = {line.number: line.problem for line in lines if line.text is None}
    of: dict[int, tuple[int, ...]] = {}
    problems: dict[int, str] = {}
    for line in lines:
        if line.text is None:
            continue
        problem = _problem(line, texts, bad, repeated)
        if problem is None:
            of[line.number] = tuple(line.neighbours)
            first = repeated.get(line.number)
            if first is not None and of.get(first) != of[line.number]:
                problem = f"{FIELD}: line {first} has the same chunk and other neighbours"
        if problem is not None:
            problems[line.number] = problem
    return Neighbourhood(of, texts, problems, repeated)


def _texts(lines: Iterable[Line]) -> tuple[dict[int, str], dict[int, int]]:
    """`texts` and `repeated` of a `Neighbourhood`."""
    texts: dict[int, str] = {}
    repeated: dict[int, int] = {}
    first_of: dict[str, int] = {}
    for line in lines:
        if line.text is not None:
            texts[line.number] = line.text
            first = first_of.setdefault(line.text, line.number)
            if first != line.number:
                repeated[line.number] = first
    return texts, repeated


def _problem(
    line: Line, texts: Mapping[int, str], bad: Mapping[int, str | None], repeated: Mapping[int, int]
) -> str | None:
    """Why a line cannot have the neighbours that it names; None = it can."""
    value = line.neighbours
    if not isinstance(value, list):
        return (
            f"{FIELD}: {show(value)} is not a list of line numbers" if value is not None else f"has no field {FIELD!r}"
        )
    for i, number in enumerate(value):
        where = f"{FIELD}[{i}]: {show(number)}"
        if isinstance(number, bool) or not isinstance(number, int):
            return f"{where} is not the number of a line"
        if number in bad:
            return f"{where} is a line without a chunk ({bad[number]})"
        if number not in texts:
            return f"{where} is no line of the file"
        if texts[number] == line.text:
            return f"{where} has the chunk of the line itself"
    return None
