"""Layout: a prompt's tokens as lines of cells, the same for every method and for every kind of picture.

Verbs: `segments` (cuts the prompt at its chunks), `lay_out` (wraps a range of it into lines). Positions count tokens,
widths count characters of a monospaced font. A segment begins a new line.

    | head | chunk 0 | chunk 1 | text | chunk 2 | question |
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from chunk_cache.types import Span
from chunk_cache_tools.explain.shown_prompt import PromptTokens, visible

MAX_CELL_TEXT = 40  # characters; a longer token, such as a run of spaces, is cut


@dataclass(frozen=True)
class Segment:
    """A piece of the prompt; `chunk` is its number, None for text between chunks."""

    name: str
    start: int
    end: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One token on a line; `left` and `width` in characters."""

    position: int
    text: str
    left: float
    width: float


@dataclass(frozen=True)
class Line:
    """Cells side by side; `is_first`: it is the first line of its segment that is shown."""

    segment: Segment
    cells: tuple[Cell, ...]
    is_first: bool


def segments(spans: Sequence[Span], prompt_len: int) -> list[Segment]:
    """The prompt cut at its chunks, in order; together they cover `[0, prompt_len)`."""
    found: list[Segment] = []
    position = 0
    for index, (start, end) in enumerate(spans):
        if position < start:
            found.append(Segment("text" if found else "head", position, start))
        found.append(Segment(f"chunk {index}", start, end, index))
        position = end
    if position < prompt_len:
        found.append(Segment("question", position, prompt_len))
    return found


def lay_out(tokens: PromptTokens, shown: Span, max_width: int, cell_width: float | None = None) -> tuple[Line, ...]:
    """The tokens `[shown[0], shown[1])` as lines of at most `max_width` characters.

    Args:
        cell_width: width of all cells, which then have no text; None = as wide as the text, plus one character.
    """
    lines: list[Line] = []
    for segment in segments(tokens.spans, len(tokens.texts)):
        start, end = max(segment.start, shown[0]), min(segment.end, shown[1])
        is_first = True
        cells: list[Cell] = []
        left = 0.0
        for position in range(start, end):
            text = _cell_text(tokens.texts[position]) if cell_width is None else ""
            width = cell_width or text_width(text) + 1.0
            if cells and left + width > max_width:
                lines.append(Line(segment, tuple(cells), is_first))
                cells, left, is_first = [], 0.0, False
            cells.append(Cell(position, text, left, width))
            left += width
        if cells:
            lines.append(Line(segment, tuple(cells), is_first))
    return tuple(lines)


def text_width(text: str) -> int:
    """Width in characters; wide East Asian characters take two, combining marks none."""
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cell_text(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= MAX_CELL_TEXT else f"{shown[: MAX_CELL_TEXT - 1]}\u2026"
