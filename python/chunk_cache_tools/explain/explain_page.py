"""Page: an explanation as one HTML file, without scripts and without anything from the network.

Verb: `write`. The page has the table of methods, and below it the prompt line by line. Each line is shown once per
method, with each token on the colour of its state; pointing at a token shows its position and state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from chunk_cache.types import Span
from chunk_cache_tools.explain.layout import Line, lay_out
from chunk_cache_tools.explain.palette import colour_of, legend, num_layers_of, words_of
from chunk_cache_tools.explain.shown_prompt import PromptTokens
from chunk_cache_tools.explain.states import Explanation, TokenState
from chunk_cache_tools.explain.summary import Table, chunk_words, tables

LINE_CHARS = 118
_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.4 sans-serif; color: #111; background: #fff; margin: 1.5em; }
h1 { font-size: 1.3em; margin: 0 0 .2em; }
h2 { font-size: 1em; font-weight: normal; border-top: 1px solid #000; margin: 1.2em 0 .3em; padding-top: .2em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { text-align: left; padding: .15em .8em .15em 0; vertical-align: top; border-bottom: 1px solid #ddd; }
td.n, th.n { text-align: right; }
.legend, .lines { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12px; }
.legend b { font-weight: normal; padding: .1em .6em; margin-right: .6em; }
.lines { overflow-x: auto; }
.line { margin: 0 0 .7em; }
.row { white-space: nowrap; }
.row i { display: inline-block; position: sticky; left: 0; background: #fff; color: #555; font-style: normal;
  text-align: right; padding-right: .7em; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.row b { display: inline-block; font-weight: normal; white-space: pre; padding: 0 .3em; unicode-bidi: isolate;
  border-right: 1px solid #fff; border-bottom: 1px solid #fff; }
.row b:hover { outline: 2px solid #000; }
"""


def write(
    path: str | Path,
    tokens: PromptTokens,
    explanations: Sequence[Explanation],
    shown: Span,
    title: str = "What became of each token of the prompt",
) -> None:
    """Writes the page of the prompt positions `[shown[0], shown[1])`."""
    Path(path).write_text(render(tokens, explanations, shown, title), encoding="utf-8")


def render(tokens: PromptTokens, explanations: Sequence[Explanation], shown: Span, title: str) -> str:
    """The page as HTML; all text from outside is escaped."""
    states = {state: index for index, state in enumerate(_states(explanations, shown))}
    num_layers = num_layers_of(explanations)
    colours = "".join(f".s{i} {{ background: {colour_of(state, num_layers)}; }}\n" for state, i in states.items())
    label_chars = min(40, max(len(one.label) for one in explanations)) + 1
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}.row i {{ width: {label_chars}ch; }}\n{colours}</style>",
        f"</head>\n<body>\n<h1>{escape(title)}</h1>",
        f"<p>Tokens {shown[0]} to {shown[1]} of {len(tokens.texts)}.</p>",
        *(_table(table) for table in tables(explanations)),
        _legend(legend(explanations, shown), num_layers),
        '<div class="lines">',
        *_lines(lay_out(tokens, shown, LINE_CHARS), explanations, states),
        "</div>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _states(explanations: Sequence[Explanation], shown: Span) -> list[TokenState]:
    return list(dict.fromkeys(state for one in explanations for state in one.states[shown[0] : shown[1]]))


def _table(table: Table) -> str:
    rows = [_row("th", table.names, table.is_number), *(_row("td", row, table.is_number) for row in table.rows)]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _row(tag: str, texts: Sequence[str], is_number: Sequence[bool]) -> str:
    marks = (' class="n"' if one else "" for one in is_number)
    cells = (f"<{tag}{mark}>{escape(text)}</{tag}>" for text, mark in zip(texts, marks, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _legend(states: Sequence[TokenState], num_layers: int) -> str:
    entries = (f'<b style="background: {colour_of(state, num_layers)}">{words_of(state)}</b>' for state in states)
    return '<p class="legend">' + "".join(entries) + "</p>"


def _lines(lines: Sequence[Line], explanations: Sequence[Explanation], states: dict[TokenState, int]) -> Iterator[str]:
    words = [words_of(state) for state in states]
    for line in lines:
        if line.is_first:
            segment = line.segment
            about = f": {chunk_words(explanations, segment.chunk)}" if segment.chunk is not None else ""
            yield f"<h2>{escape(segment.name)}, tokens {segment.start} to {segment.end}{escape(about)}</h2>"
        yield '<div class="line">'
        texts = [escape(cell.text) for cell in line.cells]
        for one in explanations:
            label = escape(one.label)
            cells = []
            for cell, text in zip(line.cells, texts, strict=True):
                state = states[one.states[cell.position]]
                cells.append(f'<b class="s{state}" title="{cell.position}: {words[state]}">{text}</b>')
            yield f'<div class="row"><i title="{label}">{label}</i>{"".join(cells)}</div>'
        yield "</div>"
