"""Picture: an explanation as PNG or SVG, drawn by matplotlib.

Verb: `draw`. Every line of the prompt shows its tokens once and below them one band per method, so that methods can be
compared token by token. If the range has more than `MAX_READABLE_TOKENS`, only the bands are drawn. All lengths are in
points (1/72 inch), and y grows downwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font

from chunk_cache.errors import request_error
from chunk_cache.types import Span
from chunk_cache_tools.explain.layout import Line, lay_out, text_width
from chunk_cache_tools.explain.palette import colour_of, legend, num_layers_of, words_of
from chunk_cache_tools.explain.shown_prompt import PromptTokens
from chunk_cache_tools.explain.states import Explanation, TokenState
from chunk_cache_tools.explain.summary import chunk_words, tables

MAX_READABLE_TOKENS = 600
LINE_CHARS = 118
OVERVIEW_CELL_CHARS = 0.5
DPI = 130
MAX_HEIGHT = 14_400.0  # 26,000 pixels; matplotlib draws at most 2 ** 16
MONO = "DejaVu Sans Mono"  # comes with matplotlib
# Fonts for characters that MONO lacks, if they are installed.
MORE_FONTS = ("Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Unifont")

FONT_SIZE = 7.0
CHAR = 0.602 * FONT_SIZE  # advance width of every character of the font
TEXT_HEIGHT = 10.5
BAND_HEIGHT = 7.0
LINE_GAP = 7.0
SEGMENT_GAP = 5.0
MARGIN = 12.0
LEGEND_SPACE = 5
MAX_LABEL_CHARS = 30
MAX_COLUMN_CHARS = 84
ASCENT = 0.78 * TEXT_HEIGHT  # from the upper edge of a line down to its baseline
QUIET = "#555555"
ZOOM = "zoom by --tokens START:END, or write .html"
CUT = "\u2026"


@dataclass(frozen=True)
class _Frame:
    """Layout of the lines of tokens: where they begin, how many bands each has, and whether tokens have text."""

    left: float
    num_bands: int
    is_readable: bool

    @property
    def line_height(self) -> float:
        return (TEXT_HEIGHT if self.is_readable else 0.0) + self.num_bands * BAND_HEIGHT


def draw(
    path: str | Path,
    tokens: PromptTokens,
    explanations: Sequence[Explanation],
    shown: Span,
    title: str = "What became of each token of the prompt",
) -> list[str]:
    """Writes a PNG or an SVG, by the ending of `path`; returns notes about what the picture cannot show.

    Args:
        shown: the range of prompt positions.

    Raises:
        ChunkCacheRequestError: the range is too long for one picture.
    """
    is_readable = shown[1] - shown[0] <= MAX_READABLE_TOKENS
    lines = lay_out(tokens, shown, LINE_CHARS, None if is_readable else OVERVIEW_CELL_CHARS)
    head, name_lines = _head(explanations)
    label_chars = min(MAX_LABEL_CHARS, max(text_width(one.label) for one in explanations))
    frame = _Frame(MARGIN + (label_chars + 1) * CHAR, len(explanations), is_readable)
    legend_lines = _wrap_legend(legend(explanations, shown))
    top = MARGIN + (len(head) + 4 + len(legend_lines)) * TEXT_HEIGHT
    height = top + sum(_advance(line, frame) for line in lines) + MARGIN
    width = max(frame.left + LINE_CHARS * CHAR, MARGIN + max(map(text_width, head)) * CHAR) + MARGIN
    subtitle = f"tokens {shown[0]} to {shown[1]} of {len(tokens.texts)}"
    notes = []
    if not is_readable:
        notes = [f"more than {MAX_READABLE_TOKENS} tokens are drawn without their text; {ZOOM}"]
        subtitle += f", too many to be readable; {ZOOM}"
    if height > MAX_HEIGHT:
        problem = f"{shown[1] - shown[0]} tokens of {len(explanations)} methods are too many for one picture"
        raise request_error(f"--out {path}", problem, ZOOM)
    # Hinting would round the advance of each character to pixels.
    style: Any = {"font.family": [MONO, *_more_fonts()], "font.size": FONT_SIZE, "text.hinting": "no_hinting"}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # `_font_note` says it better
        figure = Figure(figsize=(width / 72, height / 72), dpi=DPI, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        _draw_head(axes, title, subtitle, head, name_lines)
        _draw_legend(axes, legend_lines, num_layers_of(explanations), MARGIN + (len(head) + 3) * TEXT_HEIGHT)
        _draw_lines(axes, lines, explanations, frame, top)
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
    return notes + _font_note(lines)


def _head(explanations: Sequence[Explanation]) -> tuple[list[str], list[int]]:
    """The tables as lines of text, and the indices of the lines with column names."""
    lines: list[str] = []
    name_lines = []
    for table in tables(explanations):
        lines += [""] if lines else []
        name_lines.append(len(lines))
        rows = [[_cut(text, MAX_COLUMN_CHARS) for text in row] for row in (table.names, *table.rows)]
        widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = zip(row, widths, table.is_number, strict=True)
            lines.append("  ".join(_padded(*cell) for cell in cells).rstrip())
    return lines, name_lines


def _padded(text: str, width: int, to_the_right: bool) -> str:
    space = " " * (width - text_width(text))
    return space + text if to_the_right else text + space


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[: num_chars - 1] + CUT


def _advance(line: Line, frame: _Frame) -> float:
    """Height of a line, with the gap and, if it is the first, the head of its segment."""
    return frame.line_height + LINE_GAP + (TEXT_HEIGHT + SEGMENT_GAP if line.is_first else 0.0)


def _draw_head(axes: Axes, title: str, subtitle: str, table: Sequence[str], name_lines: Sequence[int]) -> None:
    y = MARGIN
    _write(axes, MARGIN, y, title, fontsize=FONT_SIZE + 3, fontweight="bold")
    _write(axes, MARGIN, y + 1.5 * TEXT_HEIGHT, subtitle, color=QUIET)
    for number, text in enumerate(table):
        _write(axes, MARGIN, y + (number + 2.7) * TEXT_HEIGHT, text, color=QUIET if number in name_lines else "black")


def _wrap_legend(states: Sequence[TokenState]) -> list[list[TokenState]]:
    """The states of the legend, wrapped into lines not wider than those of the tokens."""
    lines: list[list[TokenState]] = [[]]
    used = 0
    for state in states:
        width = len(words_of(state)) + LEGEND_SPACE
        if lines[-1] and used + width > LINE_CHARS:
            lines.append([])
            used = 0
        lines[-1].append(state)
        used += width
    return lines


def _draw_legend(axes: Axes, lines: Sequence[Sequence[TokenState]], num_layers: int, y: float) -> None:
    for number, states in enumerate(lines):
        x = MARGIN
        top = y + number * TEXT_HEIGHT
        for state in states:
            _draw_cells(axes, [(x, top + 2.0, 2 * CHAR, BAND_HEIGHT)], [colour_of(state, num_layers)])
            _write(axes, x + 2.7 * CHAR, top, words_of(state))
            x += (len(words_of(state)) + LEGEND_SPACE) * CHAR


def _draw_lines(
    axes: Axes, lines: Sequence[Line], explanations: Sequence[Explanation], frame: _Frame, top: float
) -> None:
    num_layers = num_layers_of(explanations)
    boxes: list[tuple[float, float, float, float]] = []
    colours: list[str] = []
    y = top
    for line in lines:
        if line.is_first:
            y += SEGMENT_GAP
            _draw_segment_head(axes, line, explanations, frame, y)
            y += TEXT_HEIGHT
        if frame.is_readable:
            for cell in line.cells:
                _write(axes, frame.left + (cell.left + 0.5) * CHAR, y, cell.text)
        band_top = y + (TEXT_HEIGHT if frame.is_readable else 0.0)
        for one in explanations:
            label = _cut(one.label, MAX_LABEL_CHARS)
            _write(axes, frame.left - CHAR, band_top - 1.2, label, ha="right", fontsize=FONT_SIZE - 1, color=QUIET)
            for cell in line.cells:
                boxes.append((frame.left + cell.left * CHAR, band_top, cell.width * CHAR, BAND_HEIGHT))
                colours.append(colour_of(one.states[cell.position], num_layers))
            band_top += BAND_HEIGHT
        y += frame.line_height + LINE_GAP
    _draw_cells(axes, boxes, colours, edge_width=0.5 if frame.is_readable else 0.15)


def _draw_segment_head(axes: Axes, line: Line, explanations: Sequence[Explanation], frame: _Frame, y: float) -> None:
    segment = line.segment
    words = f"{segment.name}  tokens {segment.start} to {segment.end}"
    if segment.chunk is not None:
        words += f"  {chunk_words(explanations, segment.chunk)}"
    right = frame.left + LINE_CHARS * CHAR
    axes.plot((frame.left, right), (y - 1, y - 1), color="black", linewidth=0.8 if segment.chunk is not None else 0.3)
    _write(axes, frame.left, y, words, fontstyle="italic", color="#333333")


def _draw_cells(
    axes: Axes,
    boxes: Sequence[tuple[float, float, float, float]],
    colours: Sequence[str],
    edge_width: float = 0.5,
) -> None:
    """Draws filled boxes (left, top, width, height) with a white edge."""
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=edge_width), autolim=False
    )


def _write(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    """Writes text on a line whose upper left corner is (x, y); dollar signs do not start a formula."""
    axes.text(x, y + ASCENT, text, va="baseline", parse_math=False, **style)  # type: ignore[arg-type]


def _more_fonts() -> list[str]:
    installed = {font.name for font in fontManager.ttflist}
    return [name for name in MORE_FONTS if name in installed]


def _font_note(lines: Sequence[Line]) -> list[str]:
    known: set[int] = set()
    for name in (MONO, *_more_fonts()):
        known |= set(get_font(findfont(name)).get_charmap())
    missing = {char for line in lines for cell in line.cells for char in cell.text if ord(char) not in known}
    if not missing:
        return []
    return [f"{len(missing)} different characters are missing in the fonts of this machine; .html shows them"]
