"""States: what became of each token of a prompt, and `Explanation`, all that one reply says.

Verbs: `classify` (reply -> one state per token), `explain` (reply -> `Explanation`). Promise: a reply whose states
contradict its own counts is refused. The token ranges are those drawn in `chunk_cache.plan.recompute_plan`.
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
    """One token under one method; `layer`: a dropped row left the forward before the attention of this layer."""

    kind: Kind
    layer: int | None = None


@dataclass(frozen=True)
class Explanation:
    """One method's reply.

    Attributes:
        label: name of the method in pictures.
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
        """Number of recomputed rows at each layer; empty if the method chose before the forward."""
        selection = self.reply.get("selection")
        return tuple(selection["rows_per_layer"] or ()) if selection else ()


def explain(label: str, answer: str, reply: object, path: str) -> Explanation:
    """Checks a reply and classifies its tokens.

    Args:
        label, answer: as in `Explanation`.
        reply: the object `meta_info["chunk_cache"]`, decoded.
        path: where the reply came from, for messages.

    Raises:
        ChunkCacheRequestError: the reply lacks fields that a reply with `"explain": true` has, or is damaged.
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
    """The state of each token of the prompt of a reply; `[prompt_len]`.

    Raises:
        KeyError: a field is missing.
        InconsistentReply: positions lie outside the reused part of their chunk, or counts do not add up.
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
    """Labels of the methods that found other chunks stored than the first did; comparing them means little."""

    def found(one: Explanation) -> tuple[int, int, list[str]]:
        reply = one.reply
        return reply["prefix_tokens"], reply["reused_tokens"], [chunk["status"] for chunk in reply["chunks"]]

    return [one.label for one in explanations if found(one) != found(explanations[0])]
