"""Palette: the colour and the words of each state, the same in every picture.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart. A dropped row is
darker if it was part of more layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunk_cache.token_kinds import COLOURS, WORDS, Kind
from chunk_cache.types import Span
from chunk_cache_tools.explain.states import Explanation, TokenState

DROPPED_FIRST = (0xFF, 0xF3, 0xC4)
DROPPED_LAST = (0xE6, 0x9F, 0x00)
MAX_LEGEND_LAYERS = 4


def colour_of(state: TokenState, num_layers: int) -> str:
    """The colour of a state, as `#rrggbb`.

    Args:
        num_layers: layers of the model, for the shade of a dropped row.
    """
    if state.layer is None:
        return COLOURS[state.kind]
    share = min(1.0, state.layer / max(1, num_layers - 1))
    mixed = (round(a + share * (b - a)) for a, b in zip(DROPPED_FIRST, DROPPED_LAST, strict=True))
    return "#" + "".join(f"{value:02X}" for value in mixed)


def words_of(state: TokenState) -> str:
    """A few words for a legend or a tooltip."""
    return WORDS[state.kind] if state.layer is None else f"dropped at layer {state.layer}"


def num_layers_of(explanations: Sequence[Explanation]) -> int:
    """Number of layers of the model, as far as the replies tell; above every layer at which a row was dropped."""
    told = [len(one.rows_per_layer) for one in explanations]
    dropped = [state.layer + 1 for one in explanations for state in one.states if state.layer is not None]
    return max([1, *told, *dropped])


def legend(explanations: Sequence[Explanation], shown: Span) -> list[TokenState]:
    """The states of the positions `shown`, in the order of `Kind`; of many layers of dropped rows only some."""
    states = {state for one in explanations for state in one.states[shown[0] : shown[1]]}
    layers = sorted(state.layer for state in states if state.layer is not None)
    if len(layers) > MAX_LEGEND_LAYERS:
        last = len(layers) - 1
        layers = [layers[round(i * last / (MAX_LEGEND_LAYERS - 1))] for i in range(MAX_LEGEND_LAYERS)]
    entries = []
    for kind in Kind:
        if kind is Kind.DROPPED:
            entries += [TokenState(kind, layer) for layer in layers]
        elif TokenState(kind) in states:
            entries.append(TokenState(kind))
    return entries
