"""Summary: what each method did, in words and numbers; `tables`, `chunk_words`, `unranked`, and
`print_tables` for a terminal.

The numbers are the server's own; a dash stands for a number that a method does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from chunk_cache_tools.explain.shown_prompt import visible
from chunk_cache_tools.explain.states import Explanation

NONE = "-"
MAX_RUNS = 3


@dataclass(frozen=True)
class Table:
    """Rows of text below column names; `is_number` says which columns are aligned right."""

    names: tuple[str, ...]
    is_number: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(explanations: Sequence[Explanation]) -> list[Table]:
    """A table of token counts of all methods; if some chose during the forward, also one of their scores."""
    counted = ("prefix", "reused", "recomputed", "computed")
    tokens = Table(
        ("method", "ratio", *counted, "answer"),
        (False, True, *[True] * len(counted), False),
        tuple(
            (
                *(one.label, f"{one.reply['ratio']:g}"),
                *(str(one.reply[f"{name}_tokens"]) for name in counted),
                visible(one.answer.strip()),
            )
            for one in explanations
        ),
    )
    choices = tuple(_choice(one.label, one.reply["selection"]) for one in explanations if one.reply.get("selection"))
    choice = Table(("method", "rows (layers)", "scores of the reused tokens", "time"), (False,) * 4, choices)
    return [tokens, choice] if choices else [tokens]


def _choice(label: str, selection: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = selection.get("seconds")
    return (
        label,
        _layer_runs(selection.get("rows_per_layer") or ()),
        _scores(selection.get("scores")) + _focus(selection.get("focus")),
        NONE if seconds is None else f"{1e3 * seconds:.1f} ms",
    )


def _layer_runs(rows: Sequence[int]) -> str:
    """`320 (0), 48 (1-3)`: numbers of recomputed rows, and in brackets the layers that compute them."""
    runs = []
    layer = 0
    for num_rows, same in groupby(rows):
        last = layer + len(list(same)) - 1
        runs.append(f"{num_rows} ({layer if layer == last else f'{layer}-{last}'})")
        layer = last + 1
    if len(runs) > MAX_RUNS:
        runs = [*runs[: MAX_RUNS - 1], "\u2026", runs[-1]]
    return ", ".join(runs) or NONE


def _scores(scores: Mapping[str, Any] | None) -> str:
    if scores is None:
        return NONE
    where = "question" if scores["layer"] is None else f"layer {scores['layer']}"
    words = f"{where}: median {scores['median']:.3g}, max {scores['max']:.4g}, kept from {scores['selected_min']:.3g}"
    share = scores["selected_sum"] / scores["sum"] if scores["sum"] else 0.0
    return f"{words}, {share:.0%} of the sum"


def _focus(focus: Mapping[str, Any] | None) -> str:
    if focus is None:
        return ""
    if focus["settled_at_layer"] is None:
        return "; focus did not settle"
    return (
        f"; focus on chunks {', '.join(map(str, focus['chunks'] or ())) or NONE} from layer {focus['settled_at_layer']}"
    )


def chunk_words(explanations: Sequence[Explanation], index: int) -> str:
    """What became of one chunk, if all methods agree: `hit, shift +24, variant 3 of generation 0`."""
    found = [_chunk_words(one.reply["chunks"][index]) for one in explanations]
    return found[0] if all(words == found[0] for words in found) else "found differently by the methods"


def _chunk_words(chunk: Mapping[str, Any]) -> str:
    status = f"{chunk['status']} ({chunk['reason']})" if chunk.get("reason") else str(chunk["status"])
    if status != "hit":
        return status
    return f"hit, shift {chunk['shift']:+d}, variant {chunk['variant']} of generation {chunk['generation']}"


def unranked(explanations: Sequence[Explanation]) -> list[str]:
    """One sentence per method that took the first tokens of a chunk, because no statistics were stored with it."""
    sentences = []
    for one in explanations:
        chunks = [i for i, chunk in enumerate(one.reply["chunks"]) if chunk.get("ranked_by") == "position"]
        if chunks:
            listed = ", ".join(map(str, chunks))
            sentences.append(f"{one.label} found no statistics of chunks {listed} and took their first tokens")
    return sentences


def print_tables(explanations: Sequence[Explanation]) -> None:
    """Prints the tables to a terminal, or to a file as plain text."""
    console = Console()
    for table in tables(explanations):
        shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1))
        for name, is_number in zip(table.names, table.is_number, strict=True):
            is_short = is_number or name == "method"
            shown.add_column(name, justify="right" if is_number else "left", no_wrap=is_short, overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))  # an answer may look like markup of rich
        console.print(shown)
