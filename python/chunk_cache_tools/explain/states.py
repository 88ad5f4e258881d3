"""States: what became of each token of a prompt, and `Explanation`, all that one reply says.

Verbs: `classify` (reply -> one state per token), `explain` (reply -> `Explanation`). Promise: the states agree with
the reply's own counts, or it is refused; the ranges are those drawn in `chunk_cache.plan.recompute_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from chunk_cache.errors import request_error
from chunk_cache.token_kinds import Kind
from chunk_cache.types import Span
from chunk_cache_tools.explain.shown_prompt import visible

Reply: TypeAlias = Mapping[str, Any]

ASK_REMEDY = 'ask /generate with "explain": true and marked chunks'


@dataclass(frozen=True, slots=True)
class TokenState:
    """One token under one method; `layer` is the layer before whose attention a dropped row left, else None."""

    kind: Kind
    layer: int | None = None


@dataclass(frozen=True)
class Explanation:
    """One method's reply.

    Attributes:
        label: how the method is called in pictures.
        reply: the object `meta_info["chunk_cache"]`.
        answer: the text that was generated.
        states: one per token of the prompt.
    """

    label: str
    reply: Reply
    answer: str
    states: tuple[TokenState, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The marked chunks."""
        return tuple((chunk["start"], chunk["end"]) for chunk in self.reply["chunks"])

    @property
    def rows_per_layer(self) -> tuple[int, ...]:
        """Recomputed rows at each layer; empty where the method chose before the forward."""
        selection = self.reply.get("selection")
        return tuple(selection["rows_per_layer"] or ()) if selection else ()


def explain(label: str, answer: str, reply: object, path: str) -> Explanation:
    """Checks a reply and classifies its tokens.

    Args:
        label, answer: as in `Explanation`.
        reply: the object `meta_info["chunk_cache"]`, decoded.
        path: where it came from, for messages.

    Raises:
        ChunkCacheRequestError: it does not hold what a reply with `"explain": true` holds.
    """
    if not isinstance(reply, Mapping):
        raise request_error(path, "no object chunk_cache in the reply", ASK_REMEDY)
    try:
        return Explanation(visible(label), reply, answer, classify(reply))
    except KeyError as error:
        raise request_error(path, f"the reply has no field {error.args[0]!r}", ASK_REMEDY) from None
    except (TypeError, AttributeError, InconsistentReply) as error:
        raise request_error(path, f"the reply is damaged ({error})", ASK_REMEDY) from None


class InconsistentReply(ValueError):
    """The positions of a reply contradict its counts."""


def classify(reply: Reply) -> tuple[TokenState, ...]:
    """The state of each token of the prompt that a reply speaks of; `[prompt_len]`.

    Raises:
        KeyError: a field is missing.
        InconsistentReply: positions lie outside of what was brought in, or counts do not fit.
    """
    num_prefix, num_reused, num_computed = (reply[f"{kind}_tokens"] for kind in ("prefix", "reused", "computed"))
    states = [TokenState(Kind.PREFIX)] * num_prefix + [TokenState(Kind.COMPUTED)] * (num_reused + num_computed)
    for index, chunk in enumerate(reply["chunks"]):
        _classify_chunk(states, chunk, num_prefix, f"chunks[{index}]")
    kinds = Counter(state.kind for state in states)
    if kinds[Kind.PREFIX] != num_prefix or kinds[Kind.COMPUTED] != num_computed:
        raise InconsistentReply(f"its chunks bring in {len(states) - num_prefix - kinds[Kind.COMPUTED]} tokens")
    return tuple(states)


def _classify_chunk(states: list[TokenState], chunk: Reply, num_prefix: int, path: str) -> None:
    start = max(chunk["start"], num_prefix)
    end = start + chunk["reused_tokens"]
    if end > len(states):
        raise InconsistentReply(f"{path} reaches behind the prompt")
    states[start:end] = [TokenState(Kind.REUSED)] * (end - start)
    _set_states(states, chunk["recomputed_positions"], TokenState(Kind.RECOMPUTED), (start, end), path)
    for drop in chunk.get("dropped") or ():
        _set_states(states, drop["positions"], TokenState(Kind.DROPPED, drop["layer"]), (start, end), path)


def _set_states(states: list[TokenState], positions: Sequence[int], state: TokenState, span: Span, path: str) -> None:
    for position in positions:
        if not span[0] <= position < span[1]:
            raise InconsistentReply(f"{path}: position {position} was not brought in")
        states[position] = state


def differing(explanations: Sequence[Explanation]) -> list[str]:
    """Labels of those that found other things in the store than the first did; then a comparison means little."""

    def found(one: Explanation) -> tuple[int, int, list[str]]:
        reply = one.reply
        return reply["prefix_tokens"], reply["reused_tokens"], [chunk["status"] for chunk in reply["chunks"]]

    return [one.label for one in explanations if found(one) != found(explanations[0])]
